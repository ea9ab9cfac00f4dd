"""Step times and KV pool sizes as aiconfigurator measured them, op by op, on TensorRT-LLM.

docs/how-to/simulate-gpus.md has what its documentation lacks. Only building an engine imports it, which takes seconds.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from trtllm_disagg.engines.modelled.config import MODELS, ModelledArgs
from trtllm_disagg.engines.modelled.step_times import Chunk, StepParts
from trtllm_disagg.errors import ConfigError

PACKAGE = "aiconfigurator_core"
BACKEND = "trtllm"
#: Measured limits (products, attention). Beyond them the library answers without a table.
MAX_STEP_TOKENS, MAX_BATCH, MAX_CONTEXT = 32_768, 2048, 131_072
#: The longest prompt with measured prefill attention.
LONGEST_MEASURED_PROMPT = 16_384
_CACHED = 1 << 16


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Properties of one GPU."""

    kv_blocks: int
    kv_bytes_per_token: int
    link_bytes_per_second: float
    link_latency: float


class Tables:
    """`StepTimes`: the tables' own for one chunk, or decode alone. Other steps are the sum of their parts: what all
    tokens share, each chunk's attention, and decode's.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._prompt_shared = functools.lru_cache(_CACHED)(self._read_prompt_shared)
        self._prompt_attention = functools.lru_cache(_CACHED)(self._read_prompt_attention)
        self._decode = functools.lru_cache(_CACHED)(self._read_decode)

    def parts(self, chunks: Sequence[Chunk], num_decode: int, context: int) -> StepParts:
        shared, attention = self._decode(num_decode, context) if num_decode else (0.0, 0.0)
        if not chunks:
            return StepParts(shared, 0.0, attention)
        tokens = num_decode + sum(chunk.tokens for chunk in chunks)
        # All chunks share the kernels, so their start counts once.
        start = self._prompt_attention(1, 0)
        above = (self._prompt_attention(chunk.tokens, chunk.before) - start for chunk in chunks)
        return StepParts(self._prompt_shared(tokens), start + sum(above), attention)

    def _read_prompt_shared(self, tokens: int) -> float:
        return float(self._handle.mixed_step_breakdown(tokens, 0, tokens, 1)[1])

    def _read_prompt_attention(self, tokens: int, before: int) -> float:
        # The library's own split of a chunk with a prefix omits most of the prefix.
        total = self._handle.predict_prefill_latency(1, before + tokens, before)
        return float(total) - self._prompt_shared(tokens)

    def _read_decode(self, count: int, context: int) -> tuple[float, float]:
        total = float(self._handle.decode_step_latency(count, context, 1))
        attention = float(self._handle.mixed_step_breakdown(0, count, context, 1)[3])
        return total - attention, attention


def open_tables(args: ModelledArgs) -> tuple[Tables, GpuFacts]:
    """Raises ConfigError for what no table covers, naming what they cover."""
    from aiconfigurator_core.sdk import EngineHandle, estimate_kv_cache

    own = args.modelled
    require_system(own.system)
    _require_measured(args)
    model = model_of(args)
    division = _division(args)
    # Keep its warnings of poor table rows; lower levels only list files.
    logging.getLogger(PACKAGE).setLevel(logging.WARNING)
    # It warns of every backend but SGLang.
    logging.getLogger(f"{PACKAGE}.sdk.attention_lanes").setLevel(logging.ERROR)
    try:
        handle = EngineHandle.compile(
            model, own.system, BACKEND, backend_version=own.backend_version, **division
        )
        tables = Tables(handle)
        # Fails here if no table has this model's operations.
        tables.parts([Chunk(args.kv_cache_config.tokens_per_block, 0)], 1, 1)
        estimate = estimate_kv_cache(
            model,
            own.system,
            BACKEND,
            backend_version=own.backend_version,
            max_num_tokens=args.max_num_tokens,
            max_batch_size=args.max_batch_size,
            memory_fraction_kind="of_free",
            memory_fraction_value=_fraction(args),
            **division,
        )
    except Exception as error:  # many types, which name what is missing
        raise ConfigError(
            f"modelled: no table has {own.model or args.model} on {own.system} with {_shown(division)} "
            f"({' '.join(str(error).split())}); {_covered(own.system)}"
        ) from error
    system = _system(own.system)["node"]
    return tables, GpuFacts(
        kv_blocks=int(estimate["total_kv_size_tokens"]) // args.kv_cache_config.tokens_per_block,
        kv_bytes_per_token=int(estimate["kv_size_per_token_bytes"]),
        link_bytes_per_second=float(system["inter_node_bw"]),
        link_latency=float(system["p2p_latency"]),
    )


def model_of(args: ModelledArgs) -> str:
    """The tables' name of the model, or its directory. Raises ConfigError for an unknown model."""
    wanted = args.modelled.model
    if wanted is None:
        return str(args.model)
    if (name := known_model(wanted)) is None:
        raise ConfigError.bad_value(
            "modelled.model",
            wanted,
            f"no value, for the config.json of the directory in --model; {known_models()}",
        )
    return name


def known_model(wanted: str) -> str | None:
    """The tables' name of a model given in any case, with or without organisation; None if unknown."""
    names = {name.lower(): name for name in _config_names()}
    names |= {name.partition("/")[2]: full for name, full in names.items()} | MODELS
    plain = wanted.lower().removesuffix("-instruct")
    return names.get(wanted.lower()) or names.get(plain) or names.get(plain.rpartition("/")[2])


def known_models() -> str:
    """For an error message."""
    return f"one of {', '.join(MODELS)}, or of the tables' {len(_config_names())}, as {_config_names()[0]}"


def read_model_config(args: ModelledArgs) -> dict[str, Any]:
    """config.json of the modelled model."""
    model = model_of(args)
    file = Path(model) / "config.json" if args.modelled.model is None else _config_file(model)
    raw = json.loads(file.read_text(encoding="utf-8"))
    text: dict[str, Any] = raw.get("text_config") or raw
    return text


def _config_file(name: str) -> Path:
    return _root() / "model_configs" / f"{name.replace('/', '--')}_config.json"


def _config_names() -> list[str]:
    files = _config_file("x").parent.glob("*_config.json")
    return sorted(file.name.removesuffix("_config.json").replace("--", "/", 1) for file in files)


def _division(args: ModelledArgs) -> dict[str, Any]:
    """The model's division among GPUs, as the tables' arguments."""
    ranks = args.tensor_parallel_size
    experts, tensors = args.moe_expert_parallel_size or -1, args.moe_tensor_parallel_size or -1
    experts = ranks // tensors if experts < 1 and tensors > 0 else max(1, experts)
    tensors = max(1, ranks // experts) if tensors < 1 else tensors
    if experts * tensors != ranks:
        sizes = {"moe_expert_parallel_size": experts, "moe_tensor_parallel_size": tensors}
        given = {key: size for key, size in sizes.items() if (getattr(args, key) or -1) > 0}
        allowed = f"{'a divisor of ' if len(given) == 1 else ''}tensor_parallel_size {ranks}"
        raise ConfigError.bad_value(" x ".join(given), math.prod(given.values()), allowed)
    own = args.modelled
    kv_dtype = args.kv_cache_config.dtype
    return {
        "tp_size": 1 if args.enable_attention_dp else ranks,
        "attention_dp_size": ranks if args.enable_attention_dp else 1,
        "moe_ep_size": experts,
        "moe_tp_size": tensors,
        **({} if own.attention_dtype == "auto" else {"fmha_quant_mode": own.attention_dtype}),
        **({} if kv_dtype == "auto" else {"kvcache_quant_mode": kv_dtype}),
    }


def require_system(system: str, key: str = "modelled.system") -> None:
    if system not in (known := systems()):
        raise ConfigError.bad_value(key, system, f"one of {', '.join(known)}")


def _require_measured(args: ModelledArgs) -> None:
    for key, value, limit in (
        ("max_num_tokens", args.max_num_tokens, MAX_STEP_TOKENS),
        ("max_batch_size", args.max_batch_size, MAX_BATCH),
        ("max_seq_len", args.max_seq_len or 0, MAX_CONTEXT),
    ):
        if value > limit:
            raise ConfigError.bad_value(key, value, f"at most {limit}: the tables end there")


def systems() -> list[str]:
    """GPUs with tables of TensorRT-LLM."""
    root = _root() / "systems"
    return sorted(
        file.stem
        for file in root.glob("*.yaml")
        if any((root / "data" / file.stem).glob(f"gemm/{BACKEND}/*"))
    )


def _covered(system: str) -> str:
    """Describes the tables of a system for an error message."""
    root = _root() / "systems" / "data" / system
    versions = sorted({path.name for path in root.glob(f"gemm/{BACKEND}/*") if path.is_dir()})
    return (
        f"{system} has tables of TensorRT-LLM {', '.join(versions)}; modelled.attention_dtype and "
        "kv_cache_config.dtype select the attention table"
    )


def _system(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(
        (_root() / "systems" / f"{name}.yaml").read_text(encoding="utf-8")
    )
    return loaded


def _root() -> Path:
    return Path(str(resources.files(PACKAGE)))


def _fraction(args: ModelledArgs) -> float:
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    return 0.9 if fraction is None else fraction


def _shown(division: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in division.items())
