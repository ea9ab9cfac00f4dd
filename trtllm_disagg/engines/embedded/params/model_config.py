"""Reads config.json and the weights' headers, and refuses a model that the engine cannot serve.

transformers fills gaps in the file and accepts impossible numbers, and the engine would serve a wrong model. So the
file is checked first.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trtllm_disagg.engines.embedded.params.vision_config import MODEL_TYPE, language_config, language_weights
from trtllm_disagg.errors import ConfigError

#: Families tested against transformers' generate (test_families.py).
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe", "mixtral")
#: Rotary frequencies that do not depend on the sequence's length.
STATIC_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
#: Required keys and their limits: far above any model, far below what breaks something.
_SIZES = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_hidden_layers": 1 << 14,
    "vocab_size": 1 << 24,
}
#: Optional keys, which may be null.
_MORE_SIZES = {
    "head_dim": 1 << 14,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "num_local_experts": 1 << 14,
    "sliding_window": 1 << 40,
}
#: `dynamic` equals `default` up to max_position_embeddings, this engine's limit. Not `longrope`, which rotates a
#: request's positions by the length of others in the batch.
_ROPE_KINDS = (*STATIC_ROPE_KINDS, "dynamic")
_ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
    "rope_theta",
)
_QUANTISED = "no value: the embedded engine serves float32, bfloat16 and float16 weights, not quantised ones"

PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Keys that do not change a forward's numbers.
_WITHOUT_EFFECT = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
#: Families with a default head_dim or sliding_window.
_MUST_SAY = {"qwen3": ("head_dim",), "mistral": ("sliding_window",)}
#: Keys checked separately: rotation (before and since transformers 5), and unused windows.
_READ_BESIDE = {"rope_parameters", "rope_scaling", "rope_theta", "use_sliding_window"}

Size = Annotated[int, msgspec.Meta(ge=1)]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration values that the engine needs, under transformers' names."""

    model_type: str
    hidden_act: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    max_position_embeddings: Size
    rms_norm_eps: float
    head_dim: int = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: Size | None = None
    layer_types: list[str] = []
    rope_parameters: dict[str, Any] = {}
    #: Mixture of experts: Qwen's names, then Mixtral's.
    num_experts: int = 0
    moe_intermediate_size: int = 0
    mlp_only_layers: list[int] = []
    decoder_sparse_step: int = 1
    num_local_experts: int = 0
    #: transformers' configuration if it was read by transformers, which computes some rotations.
    source: Any = None

    @classmethod
    def of(cls, source: Any) -> ModelConfig:
        """From transformers' configuration, which has each family's defaults."""
        found = {name: getattr(source, name, None) for name in cls.__struct_fields__}
        given = {name: value for name, value in found.items() if value is not None}
        given.setdefault("hidden_act", "silu")
        given.setdefault("head_dim", source.hidden_size // source.num_attention_heads)
        return cls(**given | {"source": source})

    @property
    def is_plain_family(self) -> bool:
        return self.model_type in PLAIN_FAMILIES

    @property
    def has_static_rope(self) -> bool:
        """True if all rotary positions can be computed ahead."""
        rope = self.rope_parameters
        return (
            rope.get("rope_type", "default") in STATIC_ROPE_KINDS
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )


def read_config(directory: Path) -> ModelConfig:
    """Raises ConfigError for impossible or unserved values."""
    file = directory / "config.json"
    raw = read_language_config(directory)
    check_config(file, raw)
    config = read_plain_config(raw) or _read_with_transformers(directory)
    if config.hidden_act not in ("silu", "swish"):
        from transformers.activations import ACT2FN

        if config.hidden_act not in ACT2FN:
            raise ConfigError.bad_value(
                f"{file} hidden_act", config.hidden_act, f"one of {', '.join(sorted(ACT2FN))}"
            )
        if config.num_experts or config.num_local_experts:
            raise ConfigError.bad_value(f"{file} hidden_act", config.hidden_act, "silu, for experts")
    return config


def read_language_config(directory: Path) -> dict[str, Any]:
    """config.json; of a model that takes images, the language model's part."""
    file = directory / "config.json"
    return language_config(file, read_json(file))


def check_config(file: Path, raw: dict[str, Any]) -> None:
    """`raw`: the language model's part of `file`. Raises ConfigError for the first impossible value."""

    def refuse(key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError.bad_value(f"{file} {key}", value, allowed)

    if raw.get("model_type") not in FAMILIES:
        raise refuse("model_type", raw.get("model_type"), f"one of {', '.join((*FAMILIES, MODEL_TYPE))}")
    if raw.get("quantization_config") is not None:
        raise refuse("quantization_config", raw["quantization_config"], _QUANTISED)
    if (quantised := file.with_name("hf_quant_config.json")).exists():
        raise ConfigError(f"model: {quantised} says that the checkpoint is quantised; expected {_QUANTISED}")
    for key, limit in _SIZES.items():
        if not _is_size(raw.get(key), limit):
            raise refuse(key, raw.get(key), f"an integer from 1 to {limit}")
    for key, limit in _MORE_SIZES.items():
        if raw.get(key) is not None and not _is_size(raw[key], limit):
            raise refuse(key, raw[key], f"an integer from 1 to {limit}, or null")
    if not _is_positive(raw.get("rms_norm_eps")):
        raise refuse("rms_norm_eps", raw.get("rms_norm_eps"), "a number above 0")
    if raw.get("rope_theta") is not None and not _is_positive(raw["rope_theta"]):
        raise refuse("rope_theta", raw["rope_theta"], "a number above 0")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(file, key, raw.get(key))
    _check_counts(file, raw)


def _check_rope(file: Path, key: str, rope: object) -> None:
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise ConfigError.bad_value(f"{file} {key}", rope, "an object, or null")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise ConfigError.bad_value(f"{file} {key}.rope_type", kind, f"one of {', '.join(_ROPE_KINDS)}")
    for name in _ROPE_NUMBERS:
        if rope.get(name) is not None and not _is_positive(rope[name]):
            raise ConfigError.bad_value(f"{file} {key}.{name}", rope[name], "a number above 0")


def _check_counts(file: Path, raw: dict[str, Any]) -> None:
    """Keys must agree with each other."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError.bad_value(f"{file} num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if raw.get("head_dim") is None and raw["hidden_size"] % heads:
        raise ConfigError.bad_value(
            f"{file} num_attention_heads", heads, f"a divisor of hidden_size {raw['hidden_size']}"
        )
    if (raw.get("head_dim") or raw["hidden_size"] // heads) % 2:
        raise ConfigError.bad_value(
            f"{file} head_dim", raw.get("head_dim"), "an even number: rotary positions turn pairs"
        )
    experts, chosen = raw.get("num_local_experts") or raw.get("num_experts"), raw.get("num_experts_per_tok")
    if experts is not None and chosen is not None and chosen > experts:
        raise ConfigError.bad_value(f"{file} num_experts_per_tok", chosen, f"at most the {experts} experts")
    types = raw.get("layer_types")
    if types is not None and (not isinstance(types, list) or len(types) != raw["num_hidden_layers"]):
        raise ConfigError.bad_value(
            f"{file} layer_types", types, f"a list of {raw['num_hidden_layers']} types, one a layer"
        )


def _is_size(value: object, limit: int) -> bool:
    return type(value) is int and 1 <= value <= limit


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def read_plain_config(raw: dict[str, Any]) -> ModelConfig | None:
    """`raw`: the content of config.json. None if transformers must read it, for family defaults or unknown keys.

    transformers would import all its modelling code: 80 MB and over a second of every engine's start.
    """
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta")}
    family, layer_types = raw.get("model_type"), raw.get("layer_types") or ()
    if (
        family not in PLAIN_FAMILIES
        or raw.get("hidden_act") != "silu"
        or rope.keys() - {"rope_type", "rope_theta"}
        or rope.get("rope_type", "default") != "default"
        or rope.get("rope_theta") is None
        or raw.get("rope_scaling") is not None
        or raw.get("use_sliding_window")
        or any(kind != "full_attention" for kind in layer_types)
        # transformers reads a Mistral with layer types as a Ministral: only some layers have the window.
        or (family == "mistral" and raw.get("layer_types") is not None)
        or any(key not in raw for key in _MUST_SAY.get(family, ()))
    ):
        return None
    said = {key: value for key, value in raw.items() if key not in _WITHOUT_EFFECT | _READ_BESIDE}
    try:
        config = msgspec.convert({k: v for k, v in said.items() if v is not None}, ModelConfig)
    except (msgspec.ValidationError, UnicodeEncodeError):  # half a surrogate pair
        return None
    return msgspec.structs.replace(
        config,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        sliding_window=config.sliding_window if family == "mistral" else None,
        layer_types=["full_attention"] * config.num_hidden_layers,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope["rope_theta"])},
    )


def _read_with_transformers(directory: Path) -> ModelConfig:
    from transformers import AutoConfig

    try:
        read = AutoConfig.from_pretrained(directory, local_files_only=True)
        return ModelConfig.of(read.get_text_config())
    except Exception as error:  # transformers raises many types
        reason = " ".join(str(error).split())
        raise ConfigError(f"model: {directory}/config.json is not a configuration: {reason}") from error


# Is the checkpoint complete? Checked by file names, sizes and headers before anything big is loaded: transformers would
# give random numbers to a missing weight, and ignore an extra one, such as a bias that config.json does not mention.

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: dtypes that the embedded engine converts to its own, losing only precision.
_DTYPES = ("F32", "BF16", "F16", "F64")
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
#: Computed numbers that older checkpoints also store.
_COMPUTED = "rotary_emb.inv_freq"
#: Last parts of names in quantised checkpoints.
_QUANTISED_PARTS = {
    "qweight",
    "qzeros",
    "g_idx",
    "scales",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "SCB",
}

Shape = tuple[int, ...]


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight of the plain decoder `config`."""
    hidden = config.hidden_size
    expected: dict[str, Shape] = {
        f"{EMBEDDING}.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        expected[f"{HEAD}.weight"] = (config.vocab_size, hidden)
    layer = dict(_layer(config))
    for i in range(config.num_hidden_layers):
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return expected


def _check_names_and_shapes(directory: Path, config: ModelConfig, found: Mapping[str, Shape]) -> None:
    if not any(name.startswith("model.") for name in found):  # a model without its head
        found = {name if name.startswith(HEAD) else f"model.{name}": shape for name, shape in found.items()}
    expected = expected_weights(config)
    require_all(directory, sorted(expected.keys() - found.keys()), found.keys() - expected.keys(), config)
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(
                f"model: {directory}: {name} has shape {list(found[name])}, but config.json requires "
                f"{list(shape)}; correct config.json, or copy the checkpoint again"
            )


def require_all(directory: Path, missing: Seq[str], extra: Iterable[str], config: ModelConfig) -> None:
    """Raises ConfigError for missing weights, and for extra ones that are not harmless."""
    if missing:
        raise ConfigError(
            f"model: {directory} lacks {len(missing)} weights that config.json requires: {shown(missing)}; "
            "copy the checkpoint again, or correct config.json"
        )
    if harmful := sorted(name for name in extra if not _is_harmless(name, config)):
        raise ConfigError(
            f"model: {directory} has {len(harmful)} weights that config.json does not describe: {shown(harmful)}; "
            "correct config.json (num_hidden_layers, attention_bias, ...), or remove them"
        )


def _layer(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    qkv_bias = config.model_type == "qwen2" or config.attention_bias
    yield from _linear("self_attn.q_proj", query, hidden, qkv_bias)
    yield from _linear("self_attn.k_proj", key, hidden, qkv_bias)
    yield from _linear("self_attn.v_proj", key, hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, query, config.attention_bias)
    yield from _linear("mlp.gate_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, config.mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, config.mlp_bias)
    yield from ((f"{norm}.weight", (hidden,)) for norm in ("input_layernorm", "post_attention_layernorm"))
    if config.model_type == "qwen3":
        yield from ((f"self_attn.{norm}.weight", (head,)) for norm in ("q_norm", "k_norm"))


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """True for another copy of the embedding, and for computed numbers."""
    return name.endswith(_COMPUTED) or (name == f"{HEAD}.weight" and config.tie_word_embeddings)


def shown(names: Iterable[str]) -> str:
    """The first names, for a message."""
    first = list(names)
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")


def check_weight_files(
    directory: Path, config: ModelConfig, *, any_dtype: bool, takes_images: bool = False
) -> None:
    """Raises ConfigError for missing or truncated files; quantised or non-float weights; several dtypes unless
    `any_dtype`; and for a plain decoder, weights that differ from `config` (transformers checks other families, and
    the tower of a model that `takes_images`).
    """
    found = _weights(directory)
    if quantised := sorted(name for name in found if name.rpartition(".")[2] in _QUANTISED_PARTS):
        raise ConfigError(
            f"model: {directory} is quantised ({shown(quantised)}); expected float32, bfloat16 or float16 weights"
        )
    if config.is_plain_family:
        shapes = {name: tuple(tensor["shape"]) for name, tensor in found.items()}
        _check_names_and_shapes(directory, config, language_weights(shapes) if takes_images else shapes)
    dtypes: dict[str, str] = {}
    for name, tensor in found.items():
        if tensor["dtype"] not in _DTYPES:
            raise ConfigError(
                f"model: {directory}: {name} is of dtype {tensor['dtype']}; expected one of {', '.join(_DTYPES)}"
            )
        dtypes.setdefault(tensor["dtype"], f"{name} in {tensor['file']}")
    if len(dtypes) > 1 and not any_dtype:
        listed = ", ".join(f"{dtype} ({where})" for dtype, where in dtypes.items())
        raise ConfigError(
            f"dtype: 'auto' is not allowed for {directory}: its weights have several dtypes: {listed}; "
            "expected float32 or bfloat16, to which all are converted"
        )


def weight_places(directory: Path) -> dict[str, str]:
    """Weight -> file. Raises ConfigError for a missing file or an invalid index."""
    index = directory / _INDEX
    if not index.exists():
        if not (directory / _SINGLE).is_file():
            raise ConfigError(f"model: {directory} has neither {_SINGLE} nor {_INDEX}; expected one of them")
        return dict.fromkeys(_header(directory / _SINGLE), _SINGLE)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"model: {index} has no weight_map from weights to files")
    shards = sorted(set(places.values()))
    if strange := [name for name in shards if Path(name).name != name]:
        raise ConfigError(f"model: {index} names {strange[0]!r}; expected files beside it")
    if missing := [name for name in shards if not os.path.isfile(directory / name)]:
        raise ConfigError(
            f"model: {directory} lacks {len(missing)} of the {len(shards)} files that {_INDEX} names: "
            f"{', '.join(missing[:3])}; copy them there"
        )
    return places


def count_weights(directory: Path) -> int:
    """Number of parameters in a complete checkpoint."""
    return sum(math.prod(tensor["shape"]) for tensor in _weights(directory).values())


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError unless it is a readable JSON object."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return loaded


def _weights(directory: Path) -> dict[str, dict[str, Any]]:
    """Weight -> dtype, shape, file. Raises ConfigError if a file lacks a weight that the index places there."""
    places = weight_places(directory)
    headers = {file: _header(directory / file) for file in set(places.values())}
    if lost := sorted(name for name, file in places.items() if name not in headers[file]):
        raise ConfigError(
            f"model: {directory / places[lost[0]]} lacks {lost[0]}, which {_INDEX} places there; copy it again"
        )
    return {name: headers[file][name] | {"file": file} for name, file in places.items()}


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> dtype, shape. Raises ConfigError for an incomplete file."""
    # Imported here: a worker with TensorRT-LLM needs only the fingerprint, and may lack safetensors.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: {"dtype": part.get_dtype(), "shape": part.get_shape()} for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model: {path} is not a complete safetensors file: {error}; copy it again"
        ) from error


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Raises ConfigError for a tokenizer with tokens that the model lacks."""
    if not path.exists():
        return
    tokenizer = read_json(path)
    try:
        highest = max(_token_ids(tokenizer), default=0)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"model: {path} is not a tokenizer: {error!r} in its vocabulary") from error
    if highest >= vocab_size:
        raise ConfigError(
            f"model: {path} knows token {highest}; vocab_size {vocab_size} of config.json allows at most "
            f"{vocab_size - 1}; use the tokenizer that belongs to the model"
        )


def _token_ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    vocabulary = tokenizer["model"].get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from map(operator.index, ids)
    yield from (operator.index(token["id"]) for token in tokenizer.get("added_tokens") or ())
