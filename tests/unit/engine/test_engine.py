"""A request becomes a call of the LLM API; which engine that is, how it is, and that a new one is one line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import ROOT
from tests.support.handling import PROMPT, request
from tests.support.recording_pair import MAX_SEQ_LEN, leftover_tasks, recording_engine
from tests.support.stage_client import FakeContext
from trtllm_disagg.engine.capabilities import Capabilities
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import Stall, stall_seconds, until_stalled
from trtllm_disagg.engine.llm_api import load_api, translate
from trtllm_disagg.engine.table import resolve_engine
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, OLDEST_SERVED, TrtllmVersion, installed_version
from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.recording.hard_edges import RequestError
from trtllm_disagg.engines.recording.llm import LLM, SamplingParams, Script
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.local import LocalAgg


def sampling_of(**keys: Any) -> SamplingParams:
    """What the engine is asked for."""
    engine = recording_engine(guided_decoding_backend="xgrammar")
    engine.start_agg(request(**keys))
    (call,) = engine.llm.calls_of("generate_async")
    params: SamplingParams = call["sampling_params"]
    return params


def test_an_embedded_engine_without_room_is_overloaded() -> None:
    """With KvTransferError the prefill worker would be blamed."""
    error = embedded.RequestError("need 4 KV blocks", OverloadedError.category)
    assert type(translate(error)) is OverloadedError


# -- sampling


OPTIONS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "temperature": 0.0,
    "top_p": 0.75,
    "top_k": 4,
    "min_p": 0.125,
    "length_penalty": 2.0,
    "seed": 7,
    "include_stop_str_in_output": True,
    "n": 1,
    "best_of": 1,
    "use_beam_search": False,
}


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        *((name, value, value) for name, value in OPTIONS.items()),
        ("top_k", -1, 0),
        # The frontend takes any number of 64 bits, TensorRT-LLM none below 0.
        ("seed", -1, 2**63 - 1),
    ],
)
def test_every_sampling_option_reaches_the_engine(name: str, given: Any, value: Any) -> None:
    assert getattr(sampling_of(sampling_options={name: given}), name) == value


def test_a_null_leaves_the_engines_default() -> None:
    nothing = SamplingParams(max_tokens=5, detokenize=False)
    assert sampling_of(sampling_options=dict.fromkeys(OPTIONS)) == nothing
    assert sampling_of(sampling_options=None, output_options=None) == nothing


@pytest.mark.parametrize(
    ("stop_conditions", "fields"),
    [
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({}, {"max_tokens": MAX_SEQ_LEN - len(PROMPT)}),
        ({"min_tokens": 2}, {"min_tokens": 2}),
        ({"max_thinking_tokens": 9}, {"thinking_token_budget": 9}),
        ({"max_thinking_tokens": 0}, {"thinking_token_budget": 0}),
        ({"ignore_eos": True, "stop_token_ids": [1]}, {"ignore_eos": True, "stop_token_ids": None}),
        (
            {"stop_token_ids": [1], "stop_token_ids_hidden": [2]},
            {"stop_token_ids": [1, 2], "ignore_eos": False},
        ),
        # With `min_tokens` the frontend waits until it looks for the client's ids; TensorRT-LLM would not wait.
        (
            {"stop_token_ids": [1], "stop_token_ids_hidden": [2], "min_tokens": 3},
            {"stop_token_ids": [2], "min_tokens": 3, "ignore_eos": False},
        ),
        ({"stop_token_ids": [1], "min_tokens": 3}, {"stop_token_ids": None}),
        ({"stop_token_ids": [1], "min_tokens": 0}, {"stop_token_ids": [1]}),
        # The frontend looks for these in the answer, so the engine has to send them.
        (
            {"stop_token_ids_visible": [3], "stop_token_ids_hidden": [2]},
            {"ignore_eos": True, "stop_token_ids": None},
        ),
        ({"stop_token_ids_visible": []}, {"ignore_eos": False}),
    ],
)
def test_stop_conditions_become_sampling_params(
    stop_conditions: dict[str, Any], fields: dict[str, Any]
) -> None:
    params = sampling_of(stop_conditions=stop_conditions)
    assert {name: getattr(params, name) for name in fields} == fields


@pytest.mark.parametrize(("options", "logprobs"), [({}, None), ({"logprobs": 0}, 1), ({"logprobs": 3}, 3)])
def test_logprobs_of_a_request_become_those_of_sampling_params(
    options: dict[str, int], logprobs: int | None
) -> None:
    assert sampling_of(output_options=options).logprobs == logprobs


# -- refusals


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"priority": 7.0}, "priority"),
        ({"token_ids": [1] * MAX_SEQ_LEN}, f"max_seq_len {MAX_SEQ_LEN} .*at most {MAX_SEQ_LEN - 1}"),
    ],
)
def test_what_the_engine_refuses_is_the_callers_fault(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        recording_engine(guided_decoding_backend="xgrammar").start_agg(request(**keys))


@pytest.mark.parametrize("error", [ValueError("x"), TypeError("x"), NotImplementedError("x")])
def test_every_kind_of_refusal_is_the_callers_fault(error: Exception) -> None:
    engine = recording_engine()

    def refuse(**keywords: Any) -> None:
        raise error

    engine.llm.generate_async = refuse
    with pytest.raises(InvalidRequestError, match="x"):
        engine.start_agg(request())


def test_a_closed_engine_is_not_the_callers_fault() -> None:
    engine = recording_engine()
    engine.close()
    assert engine.llm.is_shut_down
    with pytest.raises(WorkerLeavingError, match="shutting down"):
        engine.start_agg(request())


# -- the rest of a call


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"routing": None}, {}),
        ({"routing": {"cache_salt": "tenant-1", "dp_rank": 0}}, {"cache_salt": "tenant-1"}),
        ({"priority": 0.75}, {"priority": 0.75}),
    ],
)
def test_salt_and_priority_are_passed_when_given(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    engine = recording_engine()
    engine.start_agg(request(**keys))
    (call,) = engine.llm.calls_of("generate_async")
    assert {name: call[name] for name in ("cache_salt", "priority") if name in call} == expected


def test_handoff_ids_name_their_worker() -> None:
    """TensorRT-LLM takes a node below 256 and a process below 64."""
    for machine_id in (0, 63, 64, 1020):
        engine = Engine(recording_engine().api, recording_engine().llm, 8, machine_id)
        engine.start_prefill(request())
        params = engine.llm.calls_of("generate_async")[0]["disaggregated_params"]
        assert params.request_type == "context_only"
        assert params.disagg_request_id >> 10 & 0x3FFF == machine_id


# -- health, load, size


async def test_engine_is_alive_unless_its_health_check_fails() -> None:
    engine = recording_engine()
    for healthy in (True, False):
        engine.llm.is_healthy = healthy
        assert await engine.is_alive() is healthy
    assert await Engine(engine.api, object(), 8).is_alive()


def test_a_health_check_that_blocks_does_not_keep_the_event_loop_from_ending() -> None:
    engine, never = recording_engine(), threading.Event()
    engine.llm._check_health = never.wait

    async def fail() -> list[DisaggError]:
        failures = (engine.failure(RequestError("x")) for _ in range(3))
        return await asyncio.gather(*failures)

    before = time.monotonic()
    with asyncio.Runner() as runner:
        errors = runner.run(fail())
        checks = [thread for thread in threading.enumerate() if thread.name == "engine-check"]
    assert time.monotonic() - before < 10, (
        "it waits for two seconds, and asyncio for its executor's threads 300"
    )
    never.set()
    assert [type(error) for error in errors] == [WorkerLeavingError] * 3
    assert len(checks) == 1


async def test_engine_that_counts_requests_is_idle_when_none_is_active() -> None:
    engine = recording_engine(recording={})
    assert await engine.is_idle()
    result = engine.start_agg(request(3))
    assert not await engine.is_idle()
    await result.aresult()
    assert await engine.is_idle()


def test_max_seq_len_is_the_lesser_of_the_engines_and_its_argument_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 640}))
    assert recording_engine(model=str(tmp_path), max_seq_len=None).max_seq_len is None
    assert recording_engine(model=str(tmp_path), max_seq_len=99).max_seq_len == 99
    engine = recording_engine(max_seq_len=None)
    engine.llm.args = engine.llm.args.model_copy(update={"max_seq_len": 4096})
    assert Capabilities(engine.llm).max_seq_len == 4096
    monkeypatch.setattr(LLM, "max_seq_len", 64, raising=False)
    assert recording_engine(max_seq_len=99).max_seq_len == 64
    assert recording_engine(max_seq_len=50).max_seq_len == 50


# -- which engine


def test_an_engine_that_is_not_installed_or_cannot_be_imported_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--engine: 'tensorrt_llm' .*No module named"):
        load_api("tensorrt_llm")
    (tmp_path / "tensorrt_llm.py").write_text("raise ImportError('libcuda.so.1: cannot open it')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"--engine: 'tensorrt_llm' .*libcuda\.so\.1"):
        load_api("tensorrt_llm")


def test_auto_engine_is_embedded_without_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_engine("auto") == "embedded"
    assert resolve_engine("embedded") == "embedded"
    assert resolve_engine("tensorrt_llm") == "tensorrt_llm"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert resolve_engine("auto") == "tensorrt_llm"


def test_engine_without_max_seq_len_gets_prompts_of_any_length() -> None:
    engine = Engine(load_api("recording"), llm=object(), max_seq_len=4096)
    assert engine.longest_prompt >= 1_000_000


# -- a new engine is a module with the LLM API and one line in the table; nothing else has to know it


TOY = """
from trtllm_disagg.engine.table import ENGINES, EngineSpec
ENGINES["toy"] = EngineSpec("toy", "trtllm_disagg.engines.recording.llm", defaults={"max_batch_size": 3})

from tests.support.worker_args import parse_worker_args
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.engine.llm_api import load_api, serve_as_rank
from trtllm_disagg.engine.table import resolve_engine
from trtllm_disagg.engines.recording import llm as recording

config = parse_worker_args(["--model", "org/model", "--engine", "toy"], {})
assert resolve_engine(config.engine) == "toy"
args = build_engine_args(config)
assert args["max_batch_size"] == 3
given = parse_worker_args(["--model", "org/model", "--engine", "toy", "--max-batch-size", "5"], {})
assert build_engine_args(given)["max_batch_size"] == 5
assert not serve_as_rank("toy", args)
assert load_api("toy").llm is recording.LLM
print("all know it")
"""


def test_a_toy_engine_needs_its_module_and_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", TOY], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("all know it\n", "", 0)


# -- versions


IN_ORDER = ["1.2.1", "1.3.0rc5", "1.3.0rc5.post1", "1.3.0rc9", "1.3.0rc22", "1.3.0", "1.4.0rc1"]


def test_versions_sort_in_order_of_release() -> None:
    versions = [TrtllmVersion.parse(text) for text in IN_ORDER]
    backwards = versions[::-1]
    assert sorted(backwards) == versions
    assert [str(version) for version in versions] == IN_ORDER
    assert TrtllmVersion.parse("1.3.0rc29+cu13") == NEWEST_KNOWN > OLDEST_SERVED


@pytest.mark.parametrize("text", ["", "1.3", "newest", "v1.3.0"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--trtllm-version.*such as 1\.3\.0rc29"):
        TrtllmVersion.parse(text)


def test_version_without_tensorrt_llm_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert installed_version() is None
    monkeypatch.setattr(metadata, "version", lambda name: "1.3.0rc29")
    assert installed_version() == "1.3.0rc29"


# -- an engine that stands still and says that it is well: nothing comes, of any of the requests that run


@pytest.fixture
def engine() -> Iterator[Engine]:
    yield recording_engine()
    LLM.forget_instances()


class Running:
    """A request of three tokens, each of which waits for a permit."""

    def __init__(self, engine: Engine) -> None:
        self.permits = asyncio.Semaphore(0)
        engine.llm.scripts.append(Script(gate=self.permits))
        self.task = asyncio.create_task(engine.finished(engine.start_agg(request(max_tokens=3))))

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.permits.release()
        await leftover_tasks()


async def looks(stall: Stall) -> int:
    await leftover_tasks()
    stall.look()
    return stall.num_looks


async def test_stall_counts_looks_without_output_while_requests_run(engine: Engine) -> None:
    stall = Stall(engine)
    assert await looks(stall) == 0, "nothing runs"
    running = Running(engine)
    assert [await looks(stall) for _ in range(3)] == [1, 2, 3]
    await running.step()
    assert [await looks(stall) for _ in range(2)] == [0, 1]
    await running.step(2)
    await running.task
    assert [await looks(stall) for _ in range(2)] == [0, 0]


async def test_only_output_and_failures_reset_the_stall_count(engine: Engine) -> None:
    stall, first = Stall(engine), Running(engine)
    assert await looks(stall) == 1
    second = Running(engine)
    assert await looks(stall) == 2
    first.task.cancel()
    assert await looks(stall) == 3
    await second.step()
    assert [await looks(stall) for _ in range(2)] == [0, 1]
    engine.llm.scripts.append(Script(error=RuntimeError("bad request")))
    with pytest.raises(EngineError, match="bad request"):
        await engine.finished(engine.start_agg(request()))
    assert await looks(stall) == 0
    second.task.cancel()
    await leftover_tasks()


async def test_an_ended_request_whose_client_does_not_read_is_no_stall(engine: Engine) -> None:
    stall, chunks = Stall(engine), LocalAgg(engine)(request(max_tokens=3), FakeContext())
    await anext(chunks)
    assert [await looks(stall) for _ in range(3)] == [0, 0, 0]
    assert not engine.has_requests()
    await chunks.aclose()


async def test_stall_reason_names_the_flag(engine: Engine) -> None:
    still = Running(engine)
    async with asyncio.timeout(30):
        assert "(--engine-stall-timeout)" in await until_stalled(engine, 0.01)
    still.task.cancel()
    await leftover_tasks()


@pytest.mark.parametrize(
    ("args", "seconds"),
    [
        ({"max_seq_len": 1_000_000}, 120 + 1000),
        ({"max_num_tokens": 8192}, 120 + 132),
        ({"max_seq_len": 100, "max_num_tokens": 8000}, 120 + 8),
        ({"max_seq_len": 1000, "cache_transceiver_config": {"kv_transfer_timeout_ms": None}}, 120 + 60 + 1),
    ],
    ids=["long prompts", "the model's length", "many short prompts", "no timeout"],
)
def test_stall_timeout_leaves_time_for_the_longest_step(args: dict[str, Any], seconds: float) -> None:
    assert stall_seconds(args) == seconds
