"""Precision and shape, as model directories say them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.worker.model_facts import UNKNOWN_MODEL, ModelFacts, read_model_facts

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def model(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None = None) -> ModelFacts:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    return read_model_facts(folder)


INSIDE = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"type": "float", "num_bits": 8},
}


@pytest.mark.parametrize(
    ("quantization", "modelopt", "kv_dtype", "precision"),
    [
        pytest.param(None, None, "bfloat16", "", id="not quantised"),
        pytest.param(
            None, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "fp8", "nvfp4", id="modelopt"
        ),
        pytest.param(None, {"quant_algo": "FP8"}, "bfloat16", "fp8", id="weights only"),
        pytest.param({"quant_method": "fp8"}, None, "bfloat16", "fp8", id="block fp8"),
        pytest.param(INSIDE, None, "fp8", "fp8", id="modelopt inside config.json"),
    ],
)
def test_auto_becomes_the_checkpoints_dtype(
    tmp_path: Path, quantization: Any, modelopt: Any, kv_dtype: str, precision: str
) -> None:
    facts = model(
        tmp_path, CONFIG | ({"quantization_config": quantization} if quantization else {}), modelopt
    )
    assert (facts.dtype, facts.kv_dtype, facts.precision) == ("bfloat16", kv_dtype, precision)


def test_two_precisions_of_one_model_have_one_layout(tmp_path: Path) -> None:
    plain = model(tmp_path / "a", CONFIG)
    quantised = model(tmp_path / "b", CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    assert plain.layout == quantised.layout != ""
    assert model(tmp_path / "c", CONFIG | {"num_key_value_heads": 8}).layout != plain.layout


def test_without_a_tokenizer_no_layout_is_known(tmp_path: Path) -> None:
    model(tmp_path, CONFIG)
    (tmp_path / "tokenizer.json").unlink()
    assert read_model_facts(tmp_path).layout == ""


@pytest.mark.parametrize(
    ("kind", "factor", "length"),
    [
        ("linear", 4.0, 16384),
        ("dynamic", 4.0, 16384),
        ("yarn", 4.0, 4096),
        ("llama3", 4.0, 4096),
        ("linear", float("inf"), None),
        ("linear", float("nan"), None),
    ],
)
def test_rope_scaling_multiplies_max_positions_as_in_tensorrt_llm(
    tmp_path: Path, kind: str, factor: float, length: int | None
) -> None:
    scaling = {"rope_scaling": {"type": kind, "factor": factor}}
    assert model(tmp_path, CONFIG | scaling).max_positions == length


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_model_without_a_readable_config_has_unknown_facts(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for name in (tmp_path, "org/model", "~no_such_user/model"):
        assert read_model_facts(name) == UNKNOWN_MODEL


def test_facts_of_a_multimodal_model_are_those_of_its_text_config(tmp_path: Path) -> None:
    facts = model(tmp_path, {"architectures": ["X"], "text_config": CONFIG})
    assert (facts.dtype, facts.max_positions) == ("bfloat16", 4096)
