"""An engine that is aborted, killed, shut down or cannot start: every request ends, every process is reaped."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from trtllm_disagg.engines.embedded import LLM, RequestError, RequestOutput, SamplingParams
from trtllm_disagg.errors import ConfigError, EngineError

ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)


def start(model: Path, **more: Any) -> LLM:
    return LLM(model, kv_cache_config={"max_tokens": 4096}, max_seq_len=512, max_batch_size=4, **more)


@pytest.fixture
def llm(embedded_llm: LLM) -> LLM:
    return embedded_llm


async def first_token(result: Any) -> None:
    await anext(result)
    assert result.outputs[0].token_ids
    assert not result.finished


# -- abort


async def test_every_choice_of_an_aborted_request_is_cancelled(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=400, ignore_eos=True)
    result = llm.generate_async([5], params, streaming=True)
    await first_token(result)
    result.abort()
    await result
    assert {output.finish_reason for output in result.outputs} == {"cancelled"}


def test_a_loop_closed_under_a_request_leaves_other_requests_alone(llm: LLM) -> None:
    async def leave() -> None:
        llm.generate_async([5], SamplingParams(max_tokens=200, ignore_eos=True), streaming=True)

    asyncio.run(leave())
    for _ in range(3):
        assert llm.generate([5]).outputs[0].finish_reason == "length"


async def test_blocking_result_inside_the_event_loop_returns(llm: LLM) -> None:
    result = llm.generate_async([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    assert result.result(timeout=30).outputs[0].length == 5
    assert llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True)).outputs[0].length == 5
    assert (await llm.generate_async([5, 6, 7])).finished


def test_a_request_outlives_its_loop(llm: LLM) -> None:
    async def start() -> RequestOutput:
        return llm.generate_async([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))

    assert asyncio.run(start()).result(timeout=30).outputs[0].length == 5


# -- the end


def test_shutdown_fails_what_runs_and_may_be_called_again(checkpoints: Checkpoints) -> None:
    llm = start(checkpoints(), skip_tokenizer_init=True)
    try:
        for text in ("text", {"prompt_token_ids": "56"}):
            with pytest.raises(ValueError, match="skip_tokenizer_init is set; pass token ids"):
                llm.generate_async(text)
        result = llm.generate_async([5], ENDLESS)
    finally:
        llm.shutdown()
    with pytest.raises(RequestError, match="shutting down"):
        result.result(timeout=10)
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async([5])
    result.abort()
    llm.shutdown()
    assert not llm._check_health()
    assert not Path(f"/proc/{llm.engine_pid}").exists(), "not even a zombie is left"


# -- an engine that cannot start


@pytest.fixture
def copied(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(checkpoints(), tmp_path / "model"))


def edit_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def test_failed_engine_start_raises_its_reason_and_leaves_no_zombie(copied: Path) -> None:
    """A tokenizer is read in the engine's process only: some are large."""
    (copied / "tokenizer.json").write_text('{"model": {"vocab": {"a": 999999}}}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json knows token 999999"):
        start(copied)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in children if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()]


def test_a_broken_checkpoint_is_refused_before_a_process_is_started(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a complete safetensors file"):
        start(copied)


@pytest.mark.parametrize("family", ["mamba", "gpt2", None])
def test_a_family_that_is_not_served_is_refused_by_name(copied: Path, family: str | None) -> None:
    edit_config(copied, model_type=family)
    with pytest.raises(ConfigError, match=f"model_type: {family!r} is not allowed"):
        Core(copied)


def test_max_seq_len_above_the_models_positions_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="max_seq_len: 4096 is not allowed; expected at most"):
        Core(checkpoints(), max_seq_len=4096)


def test_engine_process_that_exits_at_its_start_raises_an_engine_error(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EngineError, match="ended with exit code 1 while starting"):
        start(checkpoints())
