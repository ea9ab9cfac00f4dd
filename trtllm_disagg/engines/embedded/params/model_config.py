"""Reads config.json, and refuses one of a model that the engine cannot serve.

transformers fills in what a file leaves out, and takes numbers that no model has. A wrong model would be served, so
the file is checked before anything is built from it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trtllm_disagg.engines.embedded.params.checkpoint import read_json
from trtllm_disagg.errors import ConfigError

#: Families with outputs tested against transformers' own generate (test_families.py).
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe", "mixtral")
#: Rotary frequencies that do not depend on how long the sequence has become.
STATIC_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
#: What every checkpoint says, and the most that is believed. Far above any model, far below what breaks something.
_SIZES = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_hidden_layers": 1 << 14,
    "vocab_size": 1 << 24,
}
#: What some say, or say to be null.
_MORE_SIZES = {
    "head_dim": 1 << 14,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "num_local_experts": 1 << 14,
    "sliding_window": 1 << 40,
}
#: `dynamic` is `default` up to max_position_embeddings, where this engine ends. `longrope` turns positions of one
#: request by how long another one in the batch is.
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
#: Keys that change nothing about the numbers of a forward.
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
#: Families with a head_dim and a sliding_window when they are not mentioned.
_MUST_SAY = {"qwen3": ("head_dim",), "mistral": ("sliding_window",)}
#: What such a file may say of its rotation before and since transformers 5, and of windows when it has none.
_READ_BESIDE = {"rope_parameters", "rope_scaling", "rope_theta", "use_sliding_window"}

Size = Annotated[int, msgspec.Meta(ge=1)]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the engine asks of a model's configuration, under transformers' names."""

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
    #: transformers' own, where that has read it: some rotations are computed there.
    source: Any = None

    @classmethod
    def of(cls, source: Any) -> ModelConfig:
        """`source` is transformers' configuration of the model, which knows each family's defaults."""
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
        """Whether all rotary positions can be computed ahead."""
        rope = self.rope_parameters
        return (
            rope.get("rope_type", "default") in STATIC_ROPE_KINDS
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )


def read_config(directory: Path) -> ModelConfig:
    """Raises ConfigError for what no model has, and for what the engine does not serve."""
    file = directory / "config.json"
    raw = read_json(file)
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


def check_config(file: Path, raw: dict[str, Any]) -> None:
    """`raw` is the content of `file`. Raises ConfigError for the first value that cannot be."""

    def refuse(key: str, value: object, allowed: str) -> ConfigError:
        return ConfigError.bad_value(f"{file} {key}", value, allowed)

    if raw.get("model_type") not in FAMILIES:
        raise refuse("model_type", raw.get("model_type"), f"one of {', '.join(FAMILIES)}")
    if raw.get("quantization_config") is not None:
        raise refuse("quantization_config", raw["quantization_config"], _QUANTISED)
    if (quantised := file.with_name("hf_quant_config.json")).exists():
        raise ConfigError(f"model: {quantised} says that the checkpoint is quantised; expected {_QUANTISED}")
    for key, most in _SIZES.items():
        if not _is_size(raw.get(key), most):
            raise refuse(key, raw.get(key), f"a whole number from 1 to {most}")
    for key, most in _MORE_SIZES.items():
        if raw.get(key) is not None and not _is_size(raw[key], most):
            raise refuse(key, raw[key], f"a whole number from 1 to {most}, or null")
    if not _is_positive(raw.get("rms_norm_eps")):
        raise refuse("rms_norm_eps", raw.get("rms_norm_eps"), "a number above 0")
    if raw.get("rope_theta") is not None and not _is_positive(raw["rope_theta"]):
        raise refuse("rope_theta", raw["rope_theta"], "a number above 0")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(file, key, raw.get(key))
    _check_counts(file, raw)


def end_ids(file: Path, found: object, vocab_size: int) -> list[int]:
    """`found` is what `file` says under eos_token_id: an id, several, or nothing. Raises ConfigError for others."""
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int and 0 <= each < vocab_size for each in ids):
        raise ConfigError.bad_value(
            f"{file} eos_token_id", found, f"a token id below vocab_size {vocab_size}, or several"
        )
    return list(ids)


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
    """What one key says must fit to what another one says."""
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


def _is_size(value: object, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def read_plain_config(raw: dict[str, Any]) -> ModelConfig | None:
    """`raw` is the content of config.json. None: transformers has to read it.

    Its configuration classes import all of its modelling code: 80 MB and over a second of every engine's start. So a
    file that leaves nothing to a family's defaults, and says nothing unknown, is read without it.
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
        # transformers reads a Mistral with layer types as a Ministral, of which only some layers have the window.
        or (family == "mistral" and raw.get("layer_types") is not None)
        or any(key not in raw for key in _MUST_SAY.get(family, ()))
    ):
        return None
    said = {key: value for key, value in raw.items() if key not in _WITHOUT_EFFECT | _READ_BESIDE}
    try:
        config = msgspec.convert({k: v for k, v in said.items() if v is not None}, ModelConfig)
    except (msgspec.ValidationError, UnicodeEncodeError):  # of half a surrogate pair
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
        return ModelConfig.of(AutoConfig.from_pretrained(directory, local_files_only=True))
    except Exception as error:  # its complaints are of many kinds
        reason = " ".join(str(error).split())
        raise ConfigError(f"model: {directory}/config.json is not a configuration: {reason}") from error
