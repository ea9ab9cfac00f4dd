"""A model's properties by config.json, the weights' headers and the arguments, without torch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.common.model_directory import fingerprint
from trtllm_disagg.engines.embedded.ipc.messages import ImageTokens
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_config import (
    ModelConfig,
    check_config,
    check_tokenizer,
    check_weight_files,
    read_config,
    read_json,
    read_language_config,
    read_plain_config,
)
from trtllm_disagg.engines.embedded.params.vision_config import image_tokens
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    import torch


_CONFIG = "config.json"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model properties that the engine needs."""

    config: ModelConfig
    end_ids: list[int]
    #: float32 or bfloat16: dtype of the checkpoint and the KV pool; computation may use another.
    dtype: str
    #: Hash of configuration and weights; a deployment's workers must agree on it.
    fingerprint: str
    #: None for a model that takes no images.
    image_tokens: ImageTokens | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        config = self.config
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return numbers * _ITEM_BYTES[self.dtype]


def read_shape(directory: Path, dtype: str) -> ModelShape:
    """Raises ConfigError for an unservable model, before anything big is loaded."""
    config = read_config(directory)
    shape = _shape_of(directory, config, dtype)
    check_tokenizer(directory / "tokenizer.json", config.vocab_size)
    return shape


def check_arguments(arguments: dict[str, Any]) -> None:
    """`check_model` for the arguments of LLM(...); the engine checks a name on the hub."""
    args = LlmArgs.model_validate(arguments)
    if (Path(args.model) / _CONFIG).is_file():
        check_model(args)


def check_model(args: LlmArgs) -> None:
    """Raises ConfigError for a model or arguments that do not fit, within milliseconds.

    The engine checks the rest: a tokenizer may be large, and a configuration may need transformers.
    """
    directory = Path(args.model)
    raw = read_language_config(directory)
    check_config(directory / _CONFIG, raw)
    if args.tensor_parallel_size > 1 and _image_tokens(directory, raw):
        allowed = "1 for a model that takes images"
        raise ConfigError.bad_value("tensor_parallel_size", args.tensor_parallel_size, allowed)
    if (config := read_plain_config(raw)) is None:
        return
    shape = _shape_of(directory, config, args.dtype)
    max_seq_len(args, shape)
    if args.embedded.device == "cpu" or args.tensor_parallel_size > 1 or not _has_cuda_driver():
        require_memory(args, shape, available_bytes())


def _shape_of(directory: Path, config: ModelConfig, dtype: str) -> ModelShape:
    raw = read_language_config(directory)
    images = _image_tokens(directory, raw)
    check_weight_files(directory, config, any_dtype=dtype != "auto", takes_images=images is not None)
    return ModelShape(
        config=config,
        end_ids=_end_ids(directory, raw),
        dtype=_dtype(raw, dtype),
        fingerprint=fingerprint(directory),
        image_tokens=images,
    )


def _image_tokens(directory: Path, language: dict[str, Any]) -> ImageTokens | None:
    file = directory / _CONFIG
    return image_tokens(file, read_json(file), language["vocab_size"])


def max_seq_len(args: LlmArgs, shape: ModelShape) -> int:
    """Maximum tokens of prompt and answer together."""
    if args.max_seq_len is None:
        return shape.config.max_position_embeddings
    if args.max_seq_len > shape.config.max_position_embeddings:
        raise ConfigError.bad_value(
            "max_seq_len",
            args.max_seq_len,
            f"at most the model's max_position_embeddings {shape.config.max_position_embeddings}",
        )
    return args.max_seq_len


def require_memory(args: LlmArgs, shape: ModelShape, free: int) -> None:
    """Raises ConfigError if a stated size exceeds `free` bytes."""
    wanted, room = args.kv_cache_config.max_tokens, free // shape.token_bytes
    if wanted is not None and wanted > room:
        raise ConfigError.bad_value(
            "kv_cache_config.max_tokens",
            wanted,
            f"at most {room}: a KV token of this model takes {shape.token_bytes} bytes, and {free >> 20} MiB are free",
        )


def _end_ids(directory: Path, config: dict[str, Any]) -> list[int]:
    """End-of-sequence ids of generation_config.json, else of config.json. Raises ConfigError for invalid ids."""
    generation = directory / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.exists() else None
    file = generation
    if found is None:
        file, found = directory / _CONFIG, config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int and 0 <= each < config["vocab_size"] for each in ids):
        allowed = f"a token id below vocab_size {config['vocab_size']}, or several"
        raise ConfigError.bad_value(f"{file} eos_token_id", found, allowed)
    return list(ids)


def _dtype(config: dict[str, Any], wanted: str) -> str:
    said = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = said if wanted == "auto" else wanted
    if isinstance(name, str) and name in _ITEM_BYTES:
        return name
    expected = f"one of {', '.join(_ITEM_BYTES)} on the embedded engine"
    if wanted == "auto":
        allowed = f"{expected}, to which the weights are converted: config.json says {said!r}"
        raise ConfigError.bad_value("dtype", wanted, allowed)
    raise ConfigError.bad_value("dtype", name, f"auto or {expected}")


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
#: Folder of the memory hierarchy by controllers in /proc/self/cgroup: version 2, version 1.
_HIERARCHIES = {"": ".", "memory": "memory"}
#: A control group's files for limit and use: version 2, version 1.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
#: Lines of memory.stat with the page cache, /dev/shm excluded: version 2, version 1.
_CACHES = ({"inactive_file", "active_file"}, {"total_inactive_file", "total_active_file"})


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes available without swapping, within the container's limits; includes the page cache."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    of_machine = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([of_machine, *_left_by_limits(proc, cgroups)]))


def _left_by_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    for group in _control_groups(proc, cgroups):
        for (limit, used), caches in zip(_LIMITS, _CACHES, strict=True):
            # No such file: other version. Not a number: "max".
            with suppress(OSError, ValueError):
                room, in_use = (int((group / name).read_text()) for name in (limit, used))
                yield room - in_use + _cached(group, caches)


def _control_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """From this process's group up to the root (in a container: the container's)."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if (folder := _HIERARCHIES.get(controllers)) is not None:
                own = Path(path.lstrip("/"))
                yield from (cgroups / folder / each for each in (own, *own.parents))


def _cached(group: Path, names: set[str]) -> int:
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(number) for name, number in lines if name in names)
