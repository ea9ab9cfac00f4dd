"""A checkpoint that is not whole, or not what it says, is refused by name before it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded.model.model_loader import ForwardKind, load_model
from trtllm_disagg.engines.embedded.params.model_shape import read_shape
from trtllm_disagg.errors import ConfigError


@pytest.fixture
def model(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(checkpoints(), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(model: Path, words: str, dtype: str = "auto") -> None:
    with pytest.raises(ConfigError, match=words):
        read_shape(model, dtype)


@pytest.mark.parametrize(
    "raw", [b"", b"\x10\0\0\0", b"\xff" * 200, b"\2\0\0\0\0\0\0\0[]", b"\x02" + b"\0" * 7 + b"xx"]
)
def test_a_file_that_is_no_safetensors_is_refused(model: Path, raw: bytes) -> None:
    (model / "model.safetensors").write_bytes(raw)
    refused(model, r"model\.safetensors is (truncated or )?no safetensors file")


def test_bytes_too_many_or_too_few_are_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for raw in (whole[:-1], whole + b"\0"):
        weights.write_bytes(raw)
        refused(model, r"is no safetensors file, or not all of one: .*; copy it again")


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
