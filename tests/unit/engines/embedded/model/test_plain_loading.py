"""A plain decoder is read without transformers: the same configuration, weights and rotations, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Checkpoints
from tests.support.models import write_checkpoint
from trtllm_disagg.engines.embedded.model.plain_model import read_plain, rope_tables, supports
from trtllm_disagg.engines.embedded.params.model_config import PLAIN_FAMILIES, ModelConfig, read_plain_config


def raw_config(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "config.json").read_text()))


def plain_config(directory: Path) -> ModelConfig:
    config = read_plain_config(raw_config(directory))
    assert config is not None
    return config


def transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_the_configuration_is_the_one_that_transformers_reads(family: str, checkpoints: Checkpoints) -> None:
    from transformers import AutoConfig

    ours, theirs = plain_config(checkpoints(family)), AutoConfig.from_pretrained(checkpoints(family))
    read_there = ModelConfig.of(theirs)
    assert supports(ours)
    assert supports(read_there)
    compared = [name for name in ours.__struct_fields__ if hasattr(theirs, name)]
    assert len(compared) >= 13
    for name in compared:
        assert getattr(ours, name) == (getattr(theirs, name) or getattr(read_there, name)), name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_parameters": None}),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("llama", {"a_key_of_next_year": 1}),
        ("llama", {"num_hidden_layers": "four"}),
        ("llama", {"vocab_size": 0}),
        ("qwen2", {"use_sliding_window": True}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}),
        ("mistral", {"sliding_window": ...}),
        ("qwen3", {"head_dim": ...}),
        ("gemma2", {}),
    ],
)
def test_unsupported_config_is_not_read_as_plain(
    family: str, changes: dict[str, Any], checkpoints: Checkpoints
) -> None:
    raw = raw_config(checkpoints(family)) | changes
    assert read_plain_config({key: value for key, value in raw.items() if value is not ...}) is None


def test_the_configuration_of_an_older_transformers_reads_the_same(checkpoints: Checkpoints) -> None:
    raw = raw_config(checkpoints())
    older = {key: value for key, value in raw.items() if key not in ("rope_parameters", "head_dim", "dtype")}
    older |= {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
    assert read_plain_config(older) == read_plain_config(raw)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [(family, {}) for family in PLAIN_FAMILIES]
    + [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {"tie_word_embeddings": True})],
)
def test_the_weights_are_those_that_transformers_loads(
    family: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, family, **changes)
    tree = read_plain(directory, plain_config(directory), dtype)
    assert tree is not None
    ours, theirs = tree.state_dict(), transformers_model(directory, dtype).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert ours[name].dtype == dtype
        assert torch.equal(ours[name], weight), name


def test_weights_in_several_files_are_read_as_transformers_does(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = transformers_model(checkpoints(), torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    # Another form of the same weights, as some publish it.
    save_file({"norm.weight": torch.zeros(64)}, tmp_path / "consolidated.safetensors")
    tree = read_plain(tmp_path, plain_config(tmp_path), torch.float32)
    assert tree is not None
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in tree.state_dict().items())


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "name"])
def test_weights_that_do_not_fit_are_left_to_transformers(
    damage: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    weights = load_file(checkpoints() / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    match damage:
        case "missing":
            del weights[name]
        case "shape":
            weights[name] = weights[name][1:].clone()
        case "dtype":
            weights[name] = weights[name].to(torch.int8)
        case "name":
            weights = {key.removeprefix("model."): weight for key, weight in weights.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_plain(tmp_path, plain_config(checkpoints()), torch.float32) is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_the_rotations_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 500000.0} | rope,
    )
    config = ModelConfig.of(theirs)
    assert supports(config)
    expected = LlamaRotaryEmbedding(theirs)(torch.empty(1), torch.arange(2048)[None])
    for ours, theirs in zip(rope_tables(config, 2048, 16), expected, strict=True):
        assert np.array_equal(ours, theirs[0, :, :8].numpy())


def test_an_engine_for_a_plain_decoder_starts_without_transformers(checkpoints: Checkpoints) -> None:
    program = (
        "import sys; from trtllm_disagg.engines.embedded.core.build import build_core;"
        "from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs;"
        "build_core(LlmArgs(model=sys.argv[1], kv_cache_config={'max_tokens': 256}), print).close();"
        "print('transformers' in sys.modules)"
    )
    # A process of its own: other tests have imported it here.
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoints())],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert done.stdout.split() == ["False"]
