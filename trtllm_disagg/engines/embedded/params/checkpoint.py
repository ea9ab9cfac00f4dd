"""Is a checkpoint directory whole? Read from file names, sizes and headers, before anything big is loaded: transformers
would give random numbers to a weight that is missing, and ignore one that is too many, such as the bias that
config.json does not mention.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.params.model_config import ModelConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: What the embedded engine converts to its own dtype without losing more than digits.
_DTYPES = ("F32", "BF16", "F16", "F64")
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
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


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Every weight of the plain decoder that `config` describes, and its shape."""
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
    if not any(name.startswith("model.") for name in found):  # of the model without its head
        found = {name if name.startswith(HEAD) else f"model.{name}": shape for name, shape in found.items()}
    expected = expected_weights(config)
    require_all(directory, sorted(expected.keys() - found.keys()), found.keys() - expected.keys(), config)
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigError(
                f"model: {directory}: {name} has shape {list(found[name])}, where config.json asks for "
                f"{list(shape)}; correct config.json, or copy the checkpoint again"
            )


def require_all(directory: Path, missing: Seq[str], extra: Iterable[str], config: ModelConfig) -> None:
    """Raises ConfigError for weights that are missing, or too many and not harmless."""
    if missing:
        raise ConfigError(
            f"model: {directory} lacks {len(missing)} weights that its config.json asks for: {shown(missing)}; "
            "copy the checkpoint again, or correct config.json"
        )
    if harmful := sorted(name for name in extra if not _is_harmless(name, config)):
        raise ConfigError(
            f"model: {directory} has {len(harmful)} weights that its config.json has no place for: {shown(harmful)}; "
            "correct config.json (num_hidden_layers, attention_bias, ...), or leave them out"
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
    """Another copy of the embedding, or numbers that are computed."""
    return name.endswith(_COMPUTED) or (name == f"{HEAD}.weight" and config.tie_word_embeddings)


def shown(names: Iterable[str]) -> str:
    """The first of many."""
    first = list(names)
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")


def check_weight_files(directory: Path, config: ModelConfig, *, any_dtype: bool) -> None:
    """Raises ConfigError for missing or truncated files, and for weights that are quantised, of another type than plain
    floats, or of several dtypes unless `any_dtype`; for a plain decoder also for weights that are not those of
    `config`, which transformers says of the other families.
    """
    found = _weights(directory)
    if quantised := sorted(name for name in found if name.rpartition(".")[2] in _QUANTISED):
        raise ConfigError(
            f"model: {directory} is quantised ({shown(quantised)}); expected float32, bfloat16 or float16 weights"
        )
    if config.is_plain_family:
        _check_names_and_shapes(directory, config, {name: tuple(t["shape"]) for name, t in found.items()})
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
            f"dtype: 'auto' is not allowed for {directory}: its weights are of several: {listed}; "
            "expected float32 or bfloat16, to which all are converted"
        )


def weight_places(directory: Path) -> dict[str, str]:
    """Weight -> file. Raises ConfigError for a file that is missing, or an index that is none."""
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
    """Numbers in a checkpoint that is whole."""
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
    """Weight -> dtype, shape, file, of a checkpoint that has its files. Raises ConfigError when a file lacks a
    weight that the index has there.
    """
    places = weight_places(directory)
    headers = {file: _header(directory / file) for file in set(places.values())}
    if lost := sorted(name for name, file in places.items() if name not in headers[file]):
        raise ConfigError(
            f"model: {directory / places[lost[0]]} lacks {lost[0]}, which {_INDEX} says is there; copy it again"
        )
    return {name: headers[file][name] | {"file": file} for name, file in places.items()}


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> dtype, shape. Raises ConfigError when the file is not all there."""
    # Here, as a worker that runs TensorRT-LLM asks for the fingerprint only, and needs no safetensors.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: {"dtype": part.get_dtype(), "shape": part.get_shape()} for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model: {path} is no safetensors file, or not all of one: {error}; copy it again"
        ) from error


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """Raises ConfigError for one that knows tokens which the model does not."""
    if not path.exists():
        return
    tokenizer = read_json(path)
    try:
        highest = max(_token_ids(tokenizer), default=0)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"model: {path} is no tokenizer: {error!r} in its vocabulary") from error
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
