"""The weights of the model that config.json describes, as published checkpoints name them, and whether they are there.

Asked of the files' headers, before anything is loaded: transformers would give random numbers to a weight that is
missing, and ignore one that is too many, such as the bias that config.json does not mention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trtllm_disagg.errors import ConfigError

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
_MIXTURES = ("mixtral", "qwen3_moe")
#: Numbers that are computed, and that older checkpoints hold all the same.
_COMPUTED = "rotary_emb.inv_freq"
#: The last part of a quantised weight's name, or of what belongs to one.
_QUANTISED = {
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


def expected_weights(config: Any) -> dict[str, Shape]:
    """Every weight of the model that `config` describes, and its shape."""
    hidden = config.hidden_size
    expected: dict[str, Shape] = {
        f"{EMBEDDING}.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        expected[f"{HEAD}.weight"] = (config.vocab_size, hidden)
    attention = dict(_attention(config))
    for i in range(config.num_hidden_layers):
        layer = attention | dict(_experts(config) if _has_experts(config, i) else _feed_forward(config))
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return expected


def check_weights(directory: Path, config: Any, found: Mapping[str, Shape]) -> None:
    """`found`: what the files hold. Raises ConfigError for what is missing, too many, or of another shape."""
    named = found.keys()
    if quantised := sorted(name for name in named if name.rpartition(".")[2] in _QUANTISED):
        raise ConfigError(
            f"model: {directory} is quantised ({shown(quantised)}); expected float32, bfloat16 or float16 weights"
        )
    if not any(name.startswith("model.") for name in named):  # of the model without its head
        found = {name if name.startswith(HEAD) else f"model.{name}": shape for name, shape in found.items()}
    expected = expected_weights(config)
    if config.model_type in _MIXTURES and not any(".experts.0." in name for name in found):
        # Experts in one piece: transformers knows them.
        found, expected = _without_experts(found), _without_experts(expected)
    if missing := sorted(expected.keys() - found.keys()):
        raise ConfigError(
            f"model: {directory} lacks {len(missing)} weights that its config.json asks for: {shown(missing)}; "
            "copy the checkpoint again, or correct config.json"
        )
    extra = sorted(name for name in found.keys() - expected.keys() if not _is_harmless(name, config))
    if extra:
        raise ConfigError(
            f"model: {directory} has {len(extra)} weights that its config.json has no place for: {shown(extra)}; "
            "correct config.json (num_hidden_layers, attention_bias, ...), or leave them out"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(
                f"model: {directory}: {name} has shape {list(found[name])}, where config.json asks for "
                f"{list(shape)}; correct config.json, or copy the checkpoint again"
            )


def _attention(config: Any) -> Iterator[tuple[str, Shape]]:
    hidden, head = config.hidden_size, _head_dim(config)
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    output_bias = bool(getattr(config, "attention_bias", False))
    qkv_bias = config.model_type == "qwen2" or output_bias
    yield from _linear("self_attn.q_proj", query, hidden, qkv_bias)
    yield from _linear("self_attn.k_proj", key, hidden, qkv_bias)
    yield from _linear("self_attn.v_proj", key, hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, query, output_bias)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.model_type == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for norm in norms:
        yield f"{norm}.weight", (hidden,)
    if config.model_type in ("qwen3", "qwen3_moe"):
        for norm in ("q_norm", "k_norm"):
            yield f"self_attn.{norm}.weight", (head,)


def _feed_forward(config: Any) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    bias = bool(getattr(config, "mlp_bias", False))
    yield from _linear("mlp.gate_proj", inner, hidden, bias)
    yield from _linear("mlp.up_proj", inner, hidden, bias)
    yield from _linear("mlp.down_proj", hidden, inner, bias)


def _experts(config: Any) -> Iterator[tuple[str, Shape]]:
    hidden = config.hidden_size
    if config.model_type == "mixtral":
        part, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
        count, inner = config.num_local_experts, config.intermediate_size
    else:
        part, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
        count, inner = config.num_experts, config.moe_intermediate_size
    yield f"{part}.gate.weight", (count, hidden)
    for i in range(count):
        yield f"{part}.experts.{i}.{gate}.weight", (inner, hidden)
        yield f"{part}.experts.{i}.{up}.weight", (inner, hidden)
        yield f"{part}.experts.{i}.{down}.weight", (hidden, inner)


def _has_experts(config: Any, layer: int) -> bool:
    match config.model_type:
        case "mixtral":
            return True
        case "qwen3_moe":
            return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        case _:
            return False


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _without_experts(weights: Mapping[str, Shape]) -> dict[str, Shape]:
    parts = (".mlp.", ".block_sparse_moe.")
    return {name: shape for name, shape in weights.items() if not any(part in name for part in parts)}


def _is_harmless(name: str, config: Any) -> bool:
    """Another copy of the embedding, or numbers that are computed."""
    return name.endswith(_COMPUTED) or (name == f"{HEAD}.weight" and config.tie_word_embeddings)


def shown(names: Iterable[str]) -> str:
    """The first of many."""
    first = list(names)
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")
