"""Every file in engine_configs/ loads, explains itself, and fits its partner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs, check_marks, refuse_unsupported
from trtllm_disagg.engines.modelled.config import ModelledArgs

FOLDER = Path(__file__).parents[3] / "engine_configs"
FILES = sorted(FOLDER.glob("*/*.yaml"))
MODELS = sorted(path.name for path in FOLDER.iterdir())


#: The others are TensorRT-LLM's.
ENGINES: dict[str, tuple[str, type[LlmArgs]]] = {
    "demo": ("embedded", LlmArgs),
    "modelled": ("modelled", ModelledArgs),
}


def load(path: Path) -> dict[str, Any]:
    engine, _ = ENGINES.get(path.parent.name, ("tensorrt_llm", LlmArgs))
    return build_engine_args(
        WorkerConfig(model="org/model", role=Role(path.stem), engine=engine, extra_engine_args=str(path))
    )


def args_of(path: Path) -> LlmArgs:
    _, args = ENGINES.get(path.parent.name, ("tensorrt_llm", LlmArgs))
    return args(**load(path))


def short_name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def test_every_model_has_the_three_roles() -> None:
    assert MODELS == [
        "deepseek-r1",
        "demo",
        "gpt-oss-120b",
        "llama-3.1-8b",
        "llama-3.3-70b-fp8",
        "modelled",
        "qwen3",
        "qwen3-235b-a22b-fp8",
        "qwen3-32b-fp8",
    ]
    for model in MODELS:
        roles = [path.stem for path in FILES if path.parent.name == model]
        assert roles == ["agg", "decode", "prefill"]


@pytest.mark.parametrize("path", FILES, ids=short_name)
def test_every_key_of_an_engine_file_has_a_comment_and_is_known_to_its_engine(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert [line for line in lines if not line.startswith("#") and " # " not in line] == []
    args = args_of(path)
    if path.parent.name == "demo":
        assert refuse_unsupported(args) == []
    elif path.parent.name == "modelled":
        assert set(check_marks(args, "modelled")) <= {"disable_overlap_scheduler"}


@pytest.mark.parametrize("model", MODELS)
def test_the_two_sides_of_a_pair_fit(model: str) -> None:
    prefill, decode = (args_of(FOLDER / model / f"{role}.yaml") for role in ("prefill", "decode"))
    assert prefill.max_seq_len == decode.max_seq_len
    assert prefill.dtype == decode.dtype
    for name in ("tokens_per_block", "dtype", "enable_block_reuse"):
        assert getattr(prefill.kv_cache_config, name) == getattr(decode.kv_cache_config, name)
    assert prefill.cache_transceiver_config == decode.cache_transceiver_config
    for side in (prefill, decode):
        assert side.enable_chunked_prefill
        assert side.max_seq_len is not None
        assert side.cache_transceiver_config is not None
        buffer = side.cache_transceiver_config.max_tokens_in_buffer
        assert buffer is None or buffer >= side.max_seq_len
    assert prefill.disable_overlap_scheduler or model == "demo"
