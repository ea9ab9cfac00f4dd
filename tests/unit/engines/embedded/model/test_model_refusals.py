"""A checkpoint that transformers loads, and that would answer as another model, is refused by name before that."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded.model.forward import ForwardKind, load_model
from trtllm_disagg.engines.embedded.params.model_config import FAMILIES
from trtllm_disagg.engines.embedded.params.model_shape import read_shape
from trtllm_disagg.errors import ConfigError

Weights = dict[str, torch.Tensor]
MakeModel = Callable[..., Path]

QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def make_model(checkpoints: Checkpoints, tmp_path: Path) -> MakeModel:
    """A checkpoint to damage."""
    return lambda family="llama": Path(shutil.copytree(checkpoints(family), tmp_path / family))


def edit(file: Path, **changes: Any) -> None:
    """`...` takes a key out."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def save(model: Path, weights: Weights) -> None:
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def refusal(model: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_shape(model, "auto")
    assert "\n" not in str(refused.value)
    assert str(model) in str(refused.value)
    return str(refused.value)


def refusal_to_load(model: Path) -> str:
    """Of a plain decoder before it is loaded; of the other families by what transformers finds."""
    with pytest.raises(ConfigError) as refused:
        load_model(model, read_shape(model, "auto"), "modules")
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -- config.json

STATED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)


@pytest.mark.parametrize("key", STATED)
def test_config_json_key_with_a_family_default_is_refused_when_missing(
    make_model: MakeModel, key: str
) -> None:
    model = make_model()
    edit(model / "config.json", **{key: ...})
    assert f"config.json {key}: None is not allowed" in refusal(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in STATED for value in (0, -1, "64", 1e300 * 1e10, True)),
        ("hidden_size", 10**12),
        ("max_position_embeddings", 10**15),
        ("num_hidden_layers", 10**9),
        ("head_dim", 0),
        ("head_dim", 15),
        ("num_key_value_heads", 0),
        ("num_attention_heads", 5),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0.0),
        ("rope_theta", "10000"),
        ("sliding_window", -3),
        ("layer_types", ["full_attention"]),
        ("hidden_act", "sideways"),
        ("rope_scaling", "linear"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {"quant_method": "unknown"}),
    ],
)
def test_impossible_config_json_value_is_refused(make_model: MakeModel, key: str, value: object) -> None:
    model = make_model()
    edit(model / "config.json", **{key: value})
    assert re.search(
        rf"config\.json (num_key_value_heads|{key}): .* is not allowed; expected", refusal(model)
    )


def test_text_that_is_not_utf_8_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    edit(model / "config.json", attention_bias="\ud800")
    assert "config.json is not a configuration" in refusal(model)


@pytest.mark.parametrize("kind", ["sideways", "longrope"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotations_that_are_not_served_are_refused(make_model: MakeModel, key: str, kind: str) -> None:
    model = make_model()
    edit(model / "config.json", **{key: {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}})
    assert f"{key}.rope_type: '{kind}' is not allowed; expected one of default, linear" in refusal(model)


def test_rope_factor_that_is_no_number_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    edit(model / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "x"})
    assert "rope_parameters.factor: 'x' is not allowed; expected a number above 0" in refusal(model)


def test_more_experts_per_token_than_experts_is_refused(make_model: MakeModel) -> None:
    model = make_model("mixtral")
    edit(model / "config.json", num_experts_per_tok=7)
    assert "num_experts_per_tok: 7 is not allowed; expected at most the 6 experts" in refusal(model)


@pytest.mark.parametrize("found", ["</s>", ["1"], {"a": 1}, 99_999, -1, True])
def test_invalid_eos_token_id_is_refused(make_model: MakeModel, found: object) -> None:
    model = make_model()
    edit(model / "generation_config.json", eos_token_id=found)
    assert "generation_config.json eos_token_id: " in refusal(model)


def test_a_quantised_checkpoint_of_tensorrt_llm_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    (model / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "hf_quant_config.json says that the checkpoint is quantised" in refusal(model)


@pytest.mark.parametrize("text", ["[]", "[" * 50_000, "{"], ids=["list", "deep", "half"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_file_that_is_no_object_is_refused_by_its_name(make_model: MakeModel, name: str, text: str) -> None:
    model = make_model()
    (model / name).write_text(text)
    assert name in refusal(model)


@pytest.mark.parametrize(
    "text", ['{"model": {"vocab": {"a": "b"}}}', '{"model": [1]}', '{"added_tokens": [{}]}']
)
def test_a_tokenizer_without_a_vocabulary_is_refused(make_model: MakeModel, text: str) -> None:
    model = make_model()
    (model / "tokenizer.json").write_text(text)
    assert "tokenizer.json is not a tokenizer" in refusal(model)


# -- weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_too_few_or_too_many_or_of_another_shape_is_refused(
    make_model: MakeModel, family: str
) -> None:
    model = make_model(family)
    weights = load_file(model / "model.safetensors")
    last = max(name for name in weights if name.startswith("model.layers.3") and name != NORM)
    for name in (QUERY, NORM, last):
        save(model, {key: weight for key, weight in weights.items() if key != name})
        assert f"lacks 1 weights that config.json requires: {name}" in refusal_to_load(model)
        save(model, weights | {name: weights[name][1:].clone()})
        assert re.search(rf"{name} has shape .*, but|shape of .*{name}", refusal_to_load(model))
    for name in ("model.layers.1.self_attn.o_proj.bias", "model.layers.4.input_layernorm.weight"):
        save(model, weights | {name: torch.ones(64)})
        assert f"has 1 weights that config.json does not describe: {name}" in refusal_to_load(model)
    save(model, weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    read_shape(model, "auto")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_refused(make_model: MakeModel, dtype: torch.dtype) -> None:
    """They were cast, and served."""
    model = make_model()
    weights = load_file(model / "model.safetensors")
    save(model, weights | {QUERY: weights[QUERY].to(dtype)})
    assert re.search(rf"{QUERY} is of dtype \w+; expected one of F32, BF16, F16, F64", refusal(model))


def test_a_model_with_packed_weights_is_refused_as_quantised(make_model: MakeModel) -> None:
    model = make_model()
    weights = load_file(model / "model.safetensors")
    save(model, {name.replace("proj.weight", "proj.qweight"): weight for name, weight in weights.items()})
    assert "is quantised (model.layers.0.mlp.down_proj.qweight" in refusal(model)


def test_missing_expert_weights_are_refused_in_one_line(make_model: MakeModel) -> None:
    """It says what it misses in a report of many lines, which is made one here."""
    model = make_model("mixtral")
    weights = load_file(model / "model.safetensors")
    save(model, {name: weight for name, weight in weights.items() if ".experts." not in name})
    assert re.search(r"lacks \d+ weights .*experts", refusal_to_load(model))


@pytest.mark.parametrize("number", [2, 5, 77])
def test_an_expert_too_few_or_too_many_is_refused(make_model: MakeModel, number: int) -> None:
    model = make_model("mixtral")
    weights = load_file(model / "model.safetensors")
    second = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    name = second.replace("experts.2", f"experts.{number}")
    others = {key: weight for key, weight in weights.items() if key != name}
    save(model, others if name in weights else weights | {name: weights[second].clone()})
    assert "cannot load" in refusal_to_load(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [64, 63]},
        {"shape": "64"},
        {"shape": [-64, -64]},
        {"data_offsets": [-5, 10]},
        {"data_offsets": [0]},
        {"dtype": 7},
    ],
    ids=str,
)
def test_safetensors_header_that_contradicts_the_file_is_refused(
    make_model: MakeModel, changes: dict[str, Any]
) -> None:
    file = make_model() / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header[QUERY] |= changes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    assert "is not a complete safetensors file" in refusal(file.parent)


# -- files


def test_weight_index_with_paths_outside_the_model_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    index = model / "model.safetensors.index.json"
    names = load_file(model / "model.safetensors").keys()
    for shard, words in (("../x", "names '../x'"), ("/etc/passwd", "names '/etc/passwd'")):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
        assert words in refusal(model)
    shutil.copy(model / "model.safetensors", model / "other.safetensors")
    save_file({"a": torch.ones(1)}, model / "other.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "other.safetensors")}))
    assert "lacks lm_head.weight, which model.safetensors.index.json places there" in refusal(model)


def test_weights_under_another_file_name_are_refused(make_model: MakeModel) -> None:
    model = make_model()
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(model)


def test_a_directory_in_place_of_weights_is_refused(make_model: MakeModel) -> None:
    model = make_model()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()
    assert "model.safetensors" in refusal(model)


# -- other checkpoints that are not whole, or not what they say


@pytest.fixture
def model(make_model: MakeModel) -> Path:
    return make_model()


def refused(model: Path, words: str, dtype: str = "auto") -> None:
    with pytest.raises(ConfigError, match=words):
        read_shape(model, dtype)


@pytest.mark.parametrize(
    "raw", [b"", b"\x10\0\0\0", b"\xff" * 200, b"\2\0\0\0\0\0\0\0[]", b"\x02" + b"\0" * 7 + b"xx"]
)
def test_a_file_that_is_no_safetensors_is_refused(model: Path, raw: bytes) -> None:
    (model / "model.safetensors").write_bytes(raw)
    refused(model, r"model\.safetensors is not a complete safetensors file")


def test_bytes_too_many_or_too_few_are_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for raw in (whole[:-1], whole + b"\0"):
        weights.write_bytes(raw)
        refused(model, r"is not a complete safetensors file: .*; copy it again")


@pytest.mark.parametrize("name", [["float32"], {"float32": 1}, 7])
def test_dtype_that_is_no_text_is_refused(model: Path, name: object) -> None:
    edit(model / "config.json", dtype=name)
    refused(model, "dtype: 'auto' is not allowed; expected one of float32, bfloat16")


def test_shards_that_are_missing_are_named(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}))
    refused(model, r"lacks 1 of the 2 files that .*index\.json names: model-00002\.safetensors; copy them")
    index.write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    refused(model, "lacks 1 of the 1 files")
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    refused(model, "has no weight_map")


def test_weights_of_several_dtypes_need_a_stated_one(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    refused(model, r"dtype: 'auto' is not allowed .*BF16 \(model\.norm\.weight in model\.safetensors\)")
    kinds: tuple[ForwardKind, ...] = ("plain", "modules")
    for kind in kinds:
        loaded = load_model(model, read_shape(model, "float32"), kind)
        assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}


def test_a_tokenizer_of_another_model_is_refused(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 258, "content": "<new>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(model, r"tokenizer\.json knows token 258; vocab_size 258 .* at most 257; use the tokenizer")


def test_experts_need_their_activation(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoints("mixtral"), tmp_path / "mixtral"))
    edit(model / "config.json", hidden_act="gelu")
    refused(model, "hidden_act: 'gelu' is not allowed; expected silu")
