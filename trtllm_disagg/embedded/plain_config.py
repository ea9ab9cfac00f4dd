"""A plain decoder's config.json, read without transformers.

Its configuration classes import all of its modelling code: 80 MB and over a second of every engine's start. Only a file
that leaves nothing to a family's defaults, and says nothing that is not known here, is read here; transformers reads
the others, and says what is wrong with them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1)]

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
#: Families whose head_dim and sliding_window are not none when they are not mentioned.
_MUST_SAY = {"qwen3": ("head_dim",), "mistral": ("sliding_window",)}


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The attributes of transformers' configuration that the engine asks for."""

    model_type: str
    hidden_act: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    layer_types: list[str]
    rope_parameters: dict[str, Any]


class _Rope(msgspec.Struct, forbid_unknown_fields=True):
    rope_theta: float
    rope_type: Literal["default"] = "default"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_act: Literal["silu"]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    max_position_embeddings: Size
    rms_norm_eps: float
    head_dim: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: Size | None = None
    #: Of the Qwens: a window for some layers.
    use_sliding_window: bool = False
    layer_types: list[Literal["full_attention"]] | None = None
    rope_parameters: _Rope | None = None
    #: Before transformers 5.
    rope_theta: float | None = None
    rope_scaling: None = None


def read_plain_config(raw: dict[str, Any]) -> PlainConfig | None:
    """`raw` is the content of config.json. None: somebody else has to read it."""
    try:
        file = msgspec.convert({key: raw[key] for key in raw if key not in _WITHOUT_EFFECT}, _File)
    except msgspec.ValidationError:
        return None
    theta = file.rope_parameters.rope_theta if file.rope_parameters else file.rope_theta
    unsaid = [key for key in _MUST_SAY.get(file.model_type, ()) if key not in raw]
    if theta is None or unsaid or file.use_sliding_window:
        return None
    same = {field.name: getattr(file, field.name) for field in fields(PlainConfig)}
    return PlainConfig(
        **same
        | {
            "head_dim": file.head_dim or file.hidden_size // file.num_attention_heads,
            "sliding_window": file.sliding_window if file.model_type == "mistral" else None,
            "layer_types": ["full_attention"] * file.num_hidden_layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    )
