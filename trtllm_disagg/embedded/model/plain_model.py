"""A plain decoder's weights, taken out of its tree of modules, packed, the originals let go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from trtllm_disagg.activity import LOADING, NullReporter, Reporter
from trtllm_disagg.embedded.model.pack import Pack, packed
from trtllm_disagg.embedded.params.checkpoint import EMBEDDING, HEAD, Shape, expected_weights, weight_places
from trtllm_disagg.embedded.params.model_config import is_static, rope_tables

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_NO_NORM = np.empty(0, np.float32)


def supports(config: Any) -> bool:
    """`config` is transformers' configuration of the model."""
    return config.model_type in FAMILIES and config.hidden_act == "silu" and is_static(config)


@dataclass(frozen=True, slots=True)
class PlainLayer:
    input_norm: np.ndarray
    qkv: nn.Module
    q_norm: np.ndarray
    k_norm: np.ndarray
    #: One product, or with tensor parallelism one of all ranks together.
    output: nn.Module
    post_norm: np.ndarray
    gate_up: nn.Module
    down: nn.Module
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class PlainModel:
    #: (vocabulary, n), in the dtype of the checkpoint as it was read
    embedding: torch.Tensor
    layers: list[PlainLayer]
    final_norm: np.ndarray
    head: nn.Module
    num_heads: int
    eps: np.float32
    #: (positions, dim / 2) float32
    cos: np.ndarray
    sin: np.ndarray


def take_apart(
    model: Any, max_positions: int, kv_heads: int, head_dim: int, pack: Pack, reporter: Reporter | None = None
) -> PlainModel:
    """`model` is transformers' or plain_model.py's; it cannot be used afterwards. `kv_heads` are this rank's."""
    reporter = reporter or NullReporter()
    config, decoder = model.config, model.model
    cos, sin = rope_tables(config, max_positions, head_dim)
    layers: list[PlainLayer] = []
    for i in range(len(decoder.layers)):
        # Weights that stayed in their mapped file are read here.
        reporter.tell(LOADING, percent=100 * i // len(decoder.layers))
        layers.append(_take(decoder.layers[i], head_dim, _window(config, i), pack))
        # At no time are there two copies of more than one layer.
        decoder.layers[i] = nn.Identity()
    return PlainModel(
        # Copies, here and of the norms: one number that stays in the mapped file keeps all of it in memory.
        embedding=decoder.embed_tokens.weight.detach().clone(),
        layers=layers,
        final_norm=_weights(decoder.norm),
        head=packed(model.lm_head, pack),
        num_heads=config.num_attention_heads * kv_heads // config.num_key_value_heads,
        eps=np.float32(config.rms_norm_eps),
        cos=cos,
        sin=sin,
    )


def _take(layer: Any, head_dim: int, window: int | None, pack: Pack) -> PlainLayer:
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = hasattr(attention, "q_norm")
    return PlainLayer(
        input_norm=_weights(layer.input_layernorm),
        qkv=_joined((attention.q_proj, attention.k_proj, attention.v_proj), pack),
        q_norm=_weights(attention.q_norm) if has_norms else _NO_NORM,
        k_norm=_weights(attention.k_norm) if has_norms else _NO_NORM,
        output=packed(attention.o_proj, pack),
        post_norm=_weights(layer.post_attention_layernorm),
        gate_up=_joined((mlp.gate_proj, mlp.up_proj), pack),
        down=packed(mlp.down_proj, pack),
        scale=head_dim**-0.5,
        window=window,
    )


def _window(config: Any, layer: int) -> int | None:
    """Mistral has one window for all layers, the Qwens for some, Llama none."""
    match config.model_type:
        case "mistral":
            return config.sliding_window  # type: ignore[no-any-return]
        case "qwen2" | "qwen3" if config.layer_types[layer] == "sliding_attention":
            return config.sliding_window  # type: ignore[no-any-return]
        case _:
            return None


def _joined(linears: Iterable[nn.Linear], pack: Pack) -> nn.Module:
    """Several products with the same input as one."""
    parts = list(linears)
    weight = torch.cat([part.weight.detach() for part in parts])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=parts[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)
    return pack(joined)


def _weights(norm: nn.Module) -> np.ndarray:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().to(torch.float32, copy=True).numpy()


# A plain decoder's config.json, read without transformers.
#
# Its configuration classes import all of its modelling code: 80 MB and over a second of every engine's start. Only a
# file that leaves nothing to a family's defaults, and says nothing unknown, is read here; transformers reads the
# others, and says what is wrong with them.


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
#: Families with a head_dim and a sliding_window when they are not mentioned.
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
    """`raw` is the content of config.json. None: transformers has to read it."""
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


# A plain decoder's weights straight from its safetensors files.
#
# transformers' own loader is right for every model, and imports a thousand modules first: 80 MB and over a second of
# every engine's start, for a model that is taken apart at once. What does not look as expected here is left to it.


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_plain(directory: Path, config: Any, dtype: torch.dtype) -> nn.Module | None:
    """A tree of modules with the names that transformers' model has: matrices are nn.Linear, the rest holds its
    weight. Numbers that are of `dtype` already stay in the mapped file until they are copied.

    None unless the files hold every expected weight, in its expected shape and unquantised.
    """
    places, expected = weight_places(directory), expected_weights(config)
    if getattr(config, "quantization_config", None) is not None or not places.keys() >= expected.keys():
        return None
    weights = {}
    for name, weight in _read(directory, places, expected):
        if weight.shape != expected[name] or weight.dtype not in _DTYPES:
            return None
        weights[name] = weight.to(dtype)
    if config.tie_word_embeddings:
        weights[f"{HEAD}.weight"] = weights[f"{EMBEDDING}.weight"]
    return _tree(weights, config)


def _read(
    directory: Path, places: dict[str, str], names: dict[str, Shape]
) -> Iterator[tuple[str, torch.Tensor]]:
    """One file after the other."""
    for file in sorted({places[name] for name in names}):
        with safe_open(directory / file, "pt") as tensors:
            for name in names:
                if places[name] == file:
                    yield name, tensors.get_tensor(name)


def _tree(weights: dict[str, torch.Tensor], config: Any) -> nn.Module:
    root = nn.Module()
    root.config = config
    for name, weight in weights.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            is_matrix = weight.dim() == 2 and path != EMBEDDING
            bias = weights.get(f"{path}.bias")
            _place(root, path, _linear(weight, bias) if is_matrix else _holder(weight))
    return root


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for step in parents:
        if not hasattr(root, step):
            root.add_module(step, nn.ModuleList() if step == "layers" else nn.Module())
        root = root.get_submodule(step)
    root.add_module(name, module)


def _holder(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
