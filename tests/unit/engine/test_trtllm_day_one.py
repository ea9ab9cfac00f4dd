"""What TensorRT-LLM really does on the first day, where it is harder to live with than its API looks."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, model_validator

from tests.support.clock import Clock
from tests.support.day_one import PESSIMISM, Both, DayOne, kinds, opened
from tests.support.handling import ORDERS, PROMPT, collect, expected_tokens, request, tokens_of, until
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.sinks import RecordingEventSink, RecordingLoadSink, Removed, Stored
from tests.support.stage_client import FakeContext
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import SMALLEST_REQUEST, Handler, health_check_payload
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics
from trtllm_disagg.dynamo_runtime.publishers import KvEventForwarder, StatsForwarder
from trtllm_disagg.engine.cache_events import CacheEvents
from trtllm_disagg.engine.capabilities import CAPABILITIES
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.engine.handoffs_held import HandoffsHeld
from trtllm_disagg.engine.health import EngineHealth, HealthTimes, close, probe
from trtllm_disagg.engine.llm_api import check_model, load_api, translate
from trtllm_disagg.engine.readers import Statistics
from trtllm_disagg.engines.recording.hard_edges import GENERATION_TRANSFER_ERROR, PESSIMISTIC, RequestError
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    HandoffRefusedError,
    InvalidRequestError,
    KvTransferError,
    RequestCancelledError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.cancellation import POLL_SECONDS
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.peers import DECODE, PREFILL
from trtllm_disagg.types import Generate, GenerateRequest, TokenChunk, Usage
from trtllm_disagg.wire.bodies import decode_request
from trtllm_disagg.wire.handoff_protocols import DYNAMO

pytestmark = pytest.mark.usefixtures("tensorrt_llm")

#: What becomes of a KV transfer that failed, besides GENERATION_TRANSFER_ERROR (hard_edges.py has the source files).
CONTEXT_TRANSFER_ERROR = "Error in kv cache transfer for context requests"
#: The same under attention DP; of kv_transfer_timeout_ms, without and with attention DP; and of a context that one rank
#: sends for all.
OTHER_TRANSFER_ERRORS = (
    "Disagg KV cache transfer error",
    "Request 12 timed out",
    "Request timed out (KV transfer)",
    "Request 12 timed out (KV transfer)",
    "Context KV transfer failed",
    "Context KV transfer was rejected",
)

#: What a request is told once the engine's loop has ended, while its process lives and counts as healthy
#: (_torch/pyexecutor/executor_request_queue.py, py_executor.py; executor/base_worker.py).
ENDED_ENGINE_ERRORS = (
    "PyExecutor has already been shutdown.",
    "Event loop terminated with error: CUDA error: an illegal memory access was encountered",
    "Event loop shut down before a response was received for request 12.",
)

# -- the stand-in as it really is


@pytest.fixture(params=ORDERS)
def pair(request: pytest.FixtureRequest) -> DayOne:
    return Both(request.param).day_one(request.param)


# -- log probabilities of a prompt


def asking(max_tokens: int | None = 3, **keys: Any) -> GenerateRequest:
    return request(max_tokens, output_options={"prompt_logprobs": 0}, **keys)


def of_prompt(chunks: list[TokenChunk]) -> dict[str, Any] | None:
    """The token at position i has the log probability 1 - i, the first one none."""
    return chunks[-1].of_prompt


WHOLE = {
    "prompt_logprobs": [None]
    + [{str(token): {"logprob": -float(before), "rank": 1}} for before, token in enumerate(PROMPT[1:])]
}


@pytest.mark.parametrize("leaves_by", ["stop", "cancel"])
@pytest.mark.parametrize(("phase", "max_tokens"), [("prefill", 3), ("prefill", 1), ("both", 3)])
async def test_client_that_leaves_before_logprobs_of_its_prompt_damages_no_other_answer(
    phase: str, max_tokens: int, leaves_by: str
) -> None:
    engine, context, gate = opened(), FakeContext(), asyncio.Semaphore(0)
    drained: list[GenerateRequest] = []
    others_gate = asyncio.Semaphore(1)
    engine.llm.scripts += [Script(gate=others_gate), Script(gate=gate)]
    other = LocalAgg(engine)(request(max_tokens=5), FakeContext())
    seen = [await anext(other)]
    runs: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "prefill": lambda: LocalPrefill(engine, drained.append)(asking(max_tokens), context),
        "both": lambda: collect(LocalAgg(engine), asking(max_tokens), context),
    }
    leaving = asyncio.create_task(runs[phase]())
    await until(lambda: len(engine.llm.results) == 2)
    if leaves_by == "stop":
        context.stop()
    else:
        leaving.cancel()
    await asyncio.sleep(3 * POLL_SECONDS)
    for _ in range(4):
        others_gate.release()
    seen += [chunk async for chunk in other]
    assert tokens_of(seen) == expected_tokens(5)
    gate.release()
    (ended,) = await asyncio.gather(leaving, return_exceptions=True)
    assert isinstance(ended, (list, RequestCancelledError, asyncio.CancelledError))
    await until(lambda: not num_in_background())
    assert len(drained) == engine.llm.held_contexts == (phase == "prefill" and max_tokens > 1)


@pytest.mark.parametrize("order", [*ORDERS, "agg"])
async def test_logprobs_of_a_prompt_are_of_its_tokens_when_it_is_cached(order: str) -> None:
    blocks = {"kv_cache_config": {"tokens_per_block": 1}}
    if order == "agg":
        engine = opened(**blocks)
        generate: Generate = LocalAgg(engine)
        computes = engine.llm
    else:
        deployment = Both(order, **blocks).day_one(order)
        generate, computes = deployment.generate, deployment.prefill
    for salt in (None, "a", "a"):
        salted: dict[str, Any] = {} if salt is None else {"routing": {"cache_salt": salt}}
        await collect(generate, request(**salted))
        assert of_prompt(await collect(generate, asking(**salted))) == WHOLE
    salts = [call.get("cache_salt") for call in computes.calls_of("generate_async")]
    assert salts[::2] == [None, "a", "a"]
    assert len({None, "a", *salts[1::2]}) == 5


async def test_prompt_that_failed_once_is_computed_anew_by_the_fallback() -> None:
    both = Both("prefill_first", {"on_missing_stage": "local"}, kv_cache_config={"tokens_per_block": 1})
    both.engines[Role.DECODE].llm.scripts += [Script(error=RequestError(GENERATION_TRANSFER_ERROR))] * 9
    pair = both.day_one("prefill_first")
    assert of_prompt(await collect(pair.generate, asking())) == WHOLE
    assert kinds(pair.prefill)[-1] is None


# -- arguments


class DeclaredCache(BaseModel):
    model_config = ConfigDict(extra="forbid")

    dtype: str = "auto"


class Declared(BaseModel):
    """As TorchLlmArgs: with keys that are not known here, and tolerance for one that was removed."""

    model_config = ConfigDict(extra="forbid")

    model: str
    new_argument: int = 1
    kv_cache_config: DeclaredCache = DeclaredCache()

    @model_validator(mode="before")
    @classmethod
    def _tolerate(cls, given: dict[str, Any]) -> dict[str, Any]:
        given.pop("sampler_type", None)
        return given


@pytest.mark.parametrize(
    ("args", "refused"),
    [
        ({"new_argument": 3, "sampler_type": "auto", "kv_cache_config": {"dtype": "fp8"}}, None),
        ({"no_argument": 3}, "no_argument: TensorRT-LLM refuses it: Extra"),
        ({"kv_cache_config": {"dtyp": "fp8"}}, r"kv_cache_config\.dtyp: TensorRT-LLM refuses it: Extra"),
        ({"new_argument": "many"}, "new_argument: TensorRT-LLM refuses it: Input"),
    ],
)
def test_arguments_that_the_engine_refuses_are_refused_before_it_is_built(
    args: dict[str, Any], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_model("tensorrt_llm", args | {"model": "m"})  # a version without the class
    module = ModuleType("tensorrt_llm.llmapi.llm_args")
    monkeypatch.setattr(module, "TorchLlmArgs", Declared, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    given = args | {"model": "m"}
    if refused is None:
        check_model("tensorrt_llm", given)
    else:
        with pytest.raises(ConfigError, match=refused):
            check_model("tensorrt_llm", given)
    assert given == args | {"model": "m"}


# -- KV that no decode fetches


async def test_a_request_for_one_token_leaves_no_context(pair: DayOne) -> None:
    chunks = await collect(pair.generate, request(max_tokens=1))
    assert tokens_of(chunks) == expected_tokens(1)
    assert chunks[-1].finish_reason == "length"
    assert kinds(pair.prefill) == [None]
    assert kinds(pair.decode) == []
    assert pair.contexts == 0


async def test_a_client_that_leaves_behind_the_first_token_leaves_no_context(pair: DayOne) -> None:
    context = FakeContext()
    chunks = pair.generate(request(max_tokens=5), context)
    await anext(chunks)
    context.stop()
    await chunks.aclose()
    await pair.quiet()
    assert pair.contexts == 0


@pytest.mark.parametrize("strategy", ["decode_first", "router"])
async def test_a_client_that_leaves_a_remote_prefill_as_it_ends_leaves_no_context(strategy: str) -> None:
    both = Both(strategy)
    context = FakeContext()
    asked = decode_request(DYNAMO.encode(request(max_tokens=5), PREFILL))
    answers = both.handlers[Role.PREFILL](asked if strategy == "decode_first" else request(1), context)
    await anext(answers)
    context.stop()
    await answers.aclose()
    await until(lambda: not num_in_background())
    for client in both.clients.values():
        await client.idle()
    assert both.engines[Role.PREFILL].llm.held_contexts == 0
    assert kinds(both.engines[Role.DECODE].llm) == ["generation_only"]


async def test_a_prefill_that_is_finished_when_its_client_leaves_is_fetched() -> None:
    engine = opened()
    drained: list[GenerateRequest] = []
    context = FakeContext()

    async def stopped(result: Any, on_failure: object = None) -> None:
        await result.aresult()
        context.stop()

    engine.finished = stopped  # type: ignore[method-assign]
    with pytest.raises(RequestCancelledError):
        await LocalPrefill(engine, drained.append)(request(), context)
    (with_kv,) = drained
    assert with_kv.prefill_result is not None


@pytest.mark.parametrize(("age", "drains"), [(44.0, True), (46.0, False)], ids=["fresh", "near its end"])
async def test_a_handoff_is_drained_only_well_before_its_lease_ends(age: float, drains: bool) -> None:
    engine, asked = opened(), request()
    drained: list[GenerateRequest] = []
    handoff = await LocalPrefill(engine, drained.append)(asked, FakeContext())
    handoff.made_at -= age
    fetching = asked.only_fetching(handoff)
    handoff.release()
    LocalDecode(engine, repeats_first_token=False).drain(fetching)
    await until(lambda: not num_in_background())
    assert (len(drained), len(engine.llm.results)) == ((1, 2) if drains else (0, 1))


# -- the caller's faults and KV transfers


@pytest.mark.parametrize("length", [33, 63, 64, 100])
async def test_a_prompt_that_is_too_long_is_the_callers_fault(pair: DayOne, length: int) -> None:
    """More than max_num_tokens without chunks, and from max_seq_len on."""
    for _ in range(5):
        with pytest.raises(InvalidRequestError, match=r"max_num_tokens|max_seq_len"):
            await collect(pair.generate, request(token_ids=[7] * length))
    assert tokens_of(await collect(pair.generate, request())) == expected_tokens(5)


@pytest.mark.parametrize("length", [33, 64])
async def test_the_engines_own_refusal_is_the_callers_fault(length: int) -> None:
    """Where this worker does not know the engine's limits."""
    engine = opened(**PESSIMISM)
    engine.max_seq_len, engine.facts = None, EngineFacts()
    with pytest.raises(InvalidRequestError):
        await collect(LocalAgg(engine), request(token_ids=[7] * length))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (GENERATION_TRANSFER_ERROR, KvTransferError),
        (CONTEXT_TRANSFER_ERROR, KvTransferError),
        *((message, KvTransferError) for message in OTHER_TRANSFER_ERRORS),
        ("`default_max_tokens` (-1) must be greater than 0, ...", InvalidRequestError),
        # Of releases after 1.3.0rc29.
        ("This model's maximum context length is 2048 tokens. However, ...", InvalidRequestError),
        ("Error code: context_length_exceeded", InvalidRequestError),
        (
            "The sum of prompt length (9.0), query length (0) should not exceed max_num_tokens (8)",
            InvalidRequestError,
        ),
        (
            "__init__(): incompatible function arguments. ... tensorrt_llm.bindings.executor.SamplingConfig",
            InvalidRequestError,
        ),
        ("Assertion failed: topP.value() > 0.f (executor/samplingConfig.cpp:273)", InvalidRequestError),
        ("Token ID out of range", InvalidRequestError),
        ("Guided decoding error: EBNF parser error at line 1", InvalidRequestError),
        ("Guided decoding error: grammar compilation did not finish within 30s.", InvalidRequestError),
        ("Guided decoding error: internal error in build: ...", EngineError),
        ("Guided decoding error: Request 7 at slot 0 failed to accept last new token: 3.", EngineError),
        ("CUDA error: an illegal memory access was encountered", EngineError),
    ],
)
def test_uncategorised_error_is_classified_by_its_message(message: str, kind: type[DisaggError]) -> None:
    assert type(translate(RequestError(message))) is kind


@pytest.mark.parametrize("ends", [False, True])
async def test_a_decode_that_may_make_one_token_answers_with_one(ends: bool) -> None:
    """As under `router`, where a frontend calls decode whatever max_tokens is; an end token comes behind that."""
    asked = request(1, stop_conditions={"max_tokens": 1, "stop_token_ids": [7]})
    handoff = await LocalPrefill(opened(), sees_callers_max_tokens=False)(asked, FakeContext())
    engine = opened()
    if ends:
        engine.llm.scripts.append(Script(tokens=[*expected_tokens(1), 7]))
    decode = LocalDecode(engine, repeats_first_token=True)
    chunks = await collect(decode, asked.with_handoff(handoff))
    assert engine.llm.results[0].outputs[0].finish_reason == ("stop" if ends else "length")
    assert tokens_of(chunks) == expected_tokens(1)
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("length", None)
    assert chunks[-1].completion_usage == Usage.of(len(PROMPT), 1, 0)


@pytest.mark.parametrize("order", ORDERS)
async def test_answer_is_not_longer_than_the_engine_has_room_for(order: str) -> None:
    day = Both(order, max_seq_len=len(PROMPT) + 1).day_one(order)
    chunks = await collect(day.generate, request(None))
    assert tokens_of(chunks) == expected_tokens(1)
    assert chunks[-1].completion_usage == Usage.of(len(PROMPT), 1, 0)
    await day.quiet()


# -- the end of a worker


@pytest.mark.parametrize("order", ORDERS)
async def test_worker_without_requests_is_idle_unless_its_kv_may_be_read(order: str) -> None:
    both = Both(order)
    day = both.day_one(order)
    await collect(day.generate, request())
    await day.quiet()
    idle = {role: await engine.is_idle() for role, engine in both.engines.items()}
    # Under decode_first the prefill worker cannot know that its KV was read.
    assert idle == {Role.PREFILL: order == "prefill_first", Role.DECODE: True}


@pytest.mark.parametrize(("lease", "ends_at"), [({"lease_seconds": 60.0}, 60.0), ({}, 600.0)])
def test_a_handoff_ends_with_its_lease_or_after_ten_minutes(lease: dict[str, float], ends_at: float) -> None:
    held = HandoffsHeld(clock=(clock := Clock()), **lease)
    held.hold()
    clock.now = ends_at - 1.0
    assert held.count() == 1
    clock.now = ends_at
    assert held.count() == 0


def test_handoffs_that_end_with_their_lease_do_not_pile_up_in_a_worker_that_never_counts_them() -> None:
    held = HandoffsHeld(1.0, clock := Clock())
    for _ in range(5000):
        held.hold()
        clock.now += 0.01
    assert len(held._made) <= 1124


def stat(active: int = 0, used: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "numActiveRequests": active,
        "numQueuedRequests": 0,
        "kvCacheStats": {"usedNumBlocks": used},
        **more,
    }


RANK_1 = {"attentionDpRank": 1}


@pytest.mark.parametrize(
    "heard",
    [
        # The first statistic may be older than the handoff.
        pytest.param([(0.0, stat(), 1), (2.0, stat(active=1), 1), (2.0, stat(), 0)], id="idle"),
        # TensorRT-LLM's active requests are without those with KV on its way (py_executor.py, _handle_responses).
        pytest.param([(2.0, stat(used=3), 1), (4.0, None, 1)], id="used"),
        pytest.param([(2.0, {"numActiveRequests": 0}, 1), (4.0, None, 1)], id="not said"),
        pytest.param(
            [(2.0, stat(active=1, **RANK_1), 1), (2.0, stat(attentionDpRank=0), 1), (2.0, stat(**RANK_1), 0)],
            id="all ranks have to be idle",
        ),
    ],
)
def test_a_statistic_of_an_idle_engine_ends_what_was_handed_over_before_it(
    heard: list[tuple[float, dict[str, Any] | None, int]],
) -> None:
    held = HandoffsHeld(60.0, clock := Clock())
    held.hold()
    for clock.now, said, count in heard:
        if said is not None:
            held.update(said)
        assert held.count() == count


def test_handoffs_count_as_released_after_an_idle_second_without_statistics() -> None:
    held = HandoffsHeld(60.0, clock := Clock())
    held.hold()
    clock.now = 0.1
    held.update(stat())
    assert held.count() == 1
    clock.now = 1.2
    assert held.count() == 0, "the step of that handoff would have been heard of"
    held.hold()
    clock.now = 3.0
    assert held.count() == 1, "that one came after the statistic"


async def test_a_prefill_that_the_frontend_never_follows_up_is_counted_until_its_lease_ends() -> None:
    both = Both("router")
    await collect(both.handlers[Role.PREFILL], request(max_tokens=1))
    engine = both.engines[Role.PREFILL]
    engine.handoffs.update(stat(used=2))
    assert engine.handoffs.count() == 1
    assert engine.handoffs.oldest_seconds() > 0
    assert both.engines[Role.DECODE].llm.calls_of("generate_async") == []


# -- a dead engine, and one that is stuck

TIMES = HealthTimes(between=0.02, check=0.2, handle=0.2, shutdown=0.2, shutdown_dead=0.05)


async def told(engine: Engine, times: HealthTimes = TIMES) -> str:
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    health = EngineHealth(engine, heard.set_result, times)
    health.start()
    try:
        return await asyncio.wait_for(heard, 5)
    finally:
        health.stop()


async def test_health_check_exception_marks_the_engine_dead() -> None:
    engine = opened()
    engine.llm.die(RuntimeError("rank 3 is gone"))
    assert "rank 3 is gone" in await told(engine)
    with pytest.raises(WorkerLeavingError, match="rank 3 is gone"):
        engine.start_agg(request())


@pytest.mark.parametrize(
    ("fatal_error", "check", "said"),
    [(None, TIMES.check, "has not answered"), (RuntimeError("MPI abort"), 60, "MPI abort")],
)
async def test_a_check_that_never_answers_is_a_death_at_once_with_a_fatal_error_of_the_executor(
    fatal_error: Exception | None, check: float, said: str
) -> None:
    engine, never = opened(), threading.Event()
    engine.llm._check_health = never.wait
    if fatal_error is not None:
        engine.llm._executor = SimpleNamespace(_fatal_error=fatal_error)
    assert said in await told(engine, replace(TIMES, check=check))
    never.set()


@pytest.mark.parametrize("message", ENDED_ENGINE_ERRORS)
async def test_a_request_that_is_told_that_the_engine_has_ended_marks_it_dead(message: str) -> None:
    engine = opened()
    engine.llm.scripts.append(Script(error=RequestError(message)))
    with pytest.raises(WorkerLeavingError):
        await collect(LocalAgg(engine), request())
    assert message in await told(engine)


async def test_a_request_that_is_refused_by_an_engine_that_has_ended_marks_it_dead() -> None:
    engine = opened()

    def refuse(**keywords: Any) -> None:
        raise RequestError(ENDED_ENGINE_ERRORS[0])

    engine.llm.generate_async = refuse
    with pytest.raises(WorkerLeavingError):
        engine.start_agg(request())
    assert ENDED_ENGINE_ERRORS[0] in await told(engine)


async def test_process_ends_when_a_dead_engine_blocks_the_event_loop() -> None:
    engine = opened()
    ended, held_up = threading.Event(), threading.Event()
    health = EngineHealth(engine, lambda reason: None, TIMES, lambda reason: ended.set())
    # Another loop than this test's, which goes on.
    stuck: Any = SimpleNamespace(call_soon_threadsafe=lambda *_: held_up.set())
    health.start(stuck)
    engine.llm.die()
    assert await asyncio.to_thread(ended.wait, 10)
    assert held_up.is_set()
    health.stop()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.5, 30.0, 60.0), HealthTimes()),
        ((9.0, 30.0, 3.0), HealthTimes(between=9.0, shutdown=3.0, shutdown_dead=3.0)),
        ((0.0, 0.0, 0.0), HealthTimes(between=0.05, check=math.inf, shutdown=math.inf)),
    ],
)
def test_health_check_times_follow_the_settings(
    given: tuple[float, float, float], expected: HealthTimes
) -> None:
    times = HealthTimes.of(*given)
    assert times == expected
    assert times.between_looks + times.shutdown_dead <= 4.5, "a worker outlives its engine by 5 s at most"


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
async def test_a_wait_for_an_engine_that_dies_ends_without_an_abort_there(phase: str) -> None:
    handoff = await LocalPrefill(opened())(asked := request(), FakeContext())
    engine = opened()
    engine.llm.scripts.append(Script(gate=asyncio.Semaphore(0)))
    decode = LocalDecode(engine, repeats_first_token=True)
    runs: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "prefill": lambda: LocalPrefill(engine)(asked, FakeContext()),
        "decode": lambda: collect(
            lambda asked, context: decode(asked, context, handoff), asked.with_handoff(handoff)
        ),
        "both": lambda: collect(LocalAgg(engine), asked),
    }
    waiting = asyncio.create_task(runs[phase]())
    await until(lambda: engine.llm.results)
    await asyncio.sleep(0)
    engine.llm.die()
    engine.die("rank 3 is gone")
    with pytest.raises(WorkerLeavingError, match="rank 3 is gone"):
        await waiting
    assert engine.llm.results[-1].aborts == []
    assert num_in_background() == 0


async def test_a_client_that_leaves_between_two_tokens_causes_no_abort_on_an_engine_that_has_died() -> None:
    engine, context = opened(), FakeContext()
    engine.llm.may_abort.set()  # without it, an abort blocks for ever
    engine.llm.scripts.append(Script(gate=asyncio.Semaphore(1)))
    chunks = LocalAgg(engine)(request(max_tokens=5), context)
    await anext(chunks)
    engine.llm.die()
    engine.die("rank 3 is gone")
    context.stop()
    await asyncio.sleep(3 * POLL_SECONDS)
    with pytest.raises(WorkerLeavingError, match="rank 3 is gone"):
        await anext(chunks)
    assert engine.llm.results[-1].aborts == []


@pytest.mark.parametrize("phase", ["prefill", "both"])
async def test_a_request_aborted_in_the_engines_queue_ends_although_the_engine_tells_nothing(
    phase: str,
) -> None:
    usual, context = opened(), FakeContext()
    engine = Engine(usual.api, usual.llm, usual.max_seq_len, abort_seconds=0.05)
    engine.llm.is_full = True
    runs: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "prefill": lambda: LocalPrefill(engine)(request(), context),
        "both": lambda: collect(LocalAgg(engine), request(), context),
    }
    waiting = asyncio.create_task(runs[phase]())
    await until(lambda: engine.llm.results)
    context.stop()
    with pytest.raises(RequestCancelledError):
        await asyncio.wait_for(waiting, 5)
    assert engine.llm.results[-1].aborts == [0]
    assert not engine.has_requests()
    assert [each.prompt_token_ids for each in engine.llm._executor._results.values()] == [[]]


async def test_a_probe_that_is_cancelled_is_aborted() -> None:
    engine = opened()
    engine.llm.scripts.append(Script(gate=asyncio.Semaphore(0)))
    probing = asyncio.create_task(engine.probe(request(max_tokens=1)))
    await until(lambda: engine.llm.results)
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing
    assert engine.llm.results[-1].is_aborted


@pytest.mark.parametrize("makes_steps", [True, False])
async def test_a_probe_behind_other_requests_is_answered_when_steps_are_made(makes_steps: bool) -> None:
    engine, gate = opened(), asyncio.Semaphore(0)
    engine.llm.scripts += [Script(gate=gate), Script(gate=asyncio.Semaphore(0))]
    prompt = asyncio.create_task(collect(LocalAgg(engine), request()))
    await until(lambda: engine.llm.results)
    probing = asyncio.create_task(probe(engine, request(max_tokens=1)))
    await until(lambda: len(engine.llm.results) == 2)
    if makes_steps:
        gate.release()
        await asyncio.wait_for(probing, 5)
    else:
        await asyncio.wait({probing}, timeout=0.2)
        assert not probing.done()
        probing.cancel()
    await until(lambda: engine.llm.results[1].is_aborted)
    prompt.cancel()


@pytest.mark.parametrize("death", [ValueError("a shape"), RequestError("a shape"), OSError("a shape")])
async def test_request_that_meets_a_dead_engine_raises_worker_leaving(death: Exception) -> None:
    engine = opened()
    engine.llm.die(death)
    with pytest.raises(WorkerLeavingError, match="a shape"):
        engine.start_agg(request())
    with pytest.raises(WorkerLeavingError, match="shutting down"):
        engine.start_agg(request())


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_shutdown_that_never_returns_is_not_waited_for(is_dead: bool) -> None:
    engine = opened()
    engine.llm.may_shut_down.clear()
    if is_dead:
        engine.die("gone")
    before = time.monotonic()
    assert not await close(engine, TIMES)
    assert time.monotonic() - before >= (0.05 if is_dead else 0.2)
    engine.llm.may_shut_down.set()


async def test_a_shutdown_that_raises_a_timeout_of_its_own_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def shutdown() -> None:
        raise TimeoutError("rank 1 did not join in time")

    engine = opened()
    monkeypatch.setattr(engine.llm, "shutdown", shutdown)
    assert await close(engine, TIMES)
    assert "the engine's shutdown failed" in caplog.text


@pytest.mark.parametrize(
    ("given", "max_tokens", "priority", "salt"),
    [
        (None, 1, 1.0, "dynamo-health-check"),
        (
            {"token_ids": [5, 6], "stop_conditions": {"max_tokens": 3}, "routing": {"cache_salt": "mine"}},
            3,
            None,
            "mine",
        ),
    ],
)
async def test_a_probe_crosses_the_engine(
    given: Any, max_tokens: int, priority: float | None, salt: str
) -> None:
    engine = opened()
    handler = Handler(LocalAgg(engine), lambda: {"role": "agg"}, probe=engine.probe).function
    payload = health_check_payload(given and json.dumps(given))
    assert [answer async for answer in handler(payload, FakeContext())] == [{"role": "agg"}]
    (call,) = engine.llm.calls_of("generate_async")
    assert call["inputs"] == payload["token_ids"]
    assert call["sampling_params"].max_tokens == max_tokens
    assert (call.get("priority"), call["cache_salt"]) == (priority, salt)
    engine.llm.die()
    with pytest.raises(Exception, match=r"shutting down|ended"):
        [answer async for answer in handler(payload, FakeContext())]


# -- the model's length


async def test_a_guide_is_refused_where_the_engine_would_ignore_it() -> None:
    asked = request(sampling_options={"guided_decoding": {"regex": "a+"}})
    with pytest.raises(InvalidRequestError, match="guided_decoding_backend"):
        opened().start_agg(asked)
    engine = opened(guided_decoding_backend="xgrammar")
    engine.start_agg(asked)
    (call,) = engine.llm.calls_of("generate_async")
    assert call["sampling_params"].guided_decoding.regex == "a+"


# -- what is no text


def messages(*contents: object) -> dict[str, Any]:
    return {"extra_args": {"messages": [{"role": "user", "content": content} for content in contents]}}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"multi_modal_data": {"image_url": [{"Url": "http://a/b.png"}]}}, "multi_modal_data"),
        (messages([{"type": "image_url", "image_url": {}}]), "image_url"),
        (messages([{"type": "text"}, {"type": "input_audio"}]), "input_audio"),
        ({"multi_modal_data": None}, None),
        ({"multi_modal_data": {}}, None),
        (messages("text", [{"type": "text", "text": "a"}]), None),
        ({"extra_args": {"messages": "nonsense"}}, None),
    ],
)
def test_media_are_refused_by_name_and_text_is_not(keys: dict[str, Any], named: str | None) -> None:
    if named is None:
        assert request(**keys).token_ids == PROMPT
    else:
        with pytest.raises(InvalidRequestError, match=f"{named}.*serves text"):
            request(**keys)


# -- where the engines meet


@pytest.mark.parametrize("said", ["tcp://h:1", ["tcp://h:1"]])
async def test_context_endpoint_is_normalised_to_a_string(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = opened(), opened()
    told = {"ctx_info_endpoint": said, "ctx_dp_rank": 2}
    monkeypatch.setattr(type(prefill.llm), "disaggregated_params", told)
    prefill = Engine(prefill.api, prefill.llm, None)
    assert prefill.ctx_info_endpoint == "tcp://h:1"
    met = prefill.rendezvous("tcp://h:1", prefill.ctx_dp_rank)
    asked = decode_request(DYNAMO.encode(request().with_rendezvous(met), DECODE))
    decode.start_decode(asked).abort()
    params = decode.llm.calls_of("generate_async")[0]["disaggregated_params"]
    assert (params.ctx_info_endpoint, params.ctx_dp_rank) == ("tcp://h:1", 2)


# -- versions


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc4"])
async def test_a_version_that_is_too_old_is_refused_by_name(version: str) -> None:
    with (
        mounted_recording_llm(PESSIMISTIC, version),
        pytest.raises(ConfigError, match=rf"{version}.*1\.3\.0rc5 or newer"),
    ):
        load_api("tensorrt_llm")


@pytest.mark.parametrize("version", ["1.3.0rc21", "1.3.0rc22", "1.3.0rc29"])
@pytest.mark.parametrize("order", ORDERS)
async def test_global_request_ids_are_made_with_every_versions_signature(version: str, order: str) -> None:
    with mounted_recording_llm(PESSIMISTIC, version):
        day = Both(order).day_one(order)
        assert tokens_of(await collect(day.generate, request())) == expected_tokens(5)
        assert kinds(day.prefill) == ["context_only"]
        await day.quiet()


async def test_an_engine_that_takes_no_priority_serves_requests_and_probes_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Releases before PR 12362, the last of them between 1.3.0rc8 and 1.3.0rc13."""
    newest = LLM.generate_async

    signature = inspect.signature(newest)
    parameters = [each for name, each in signature.parameters.items() if name != "priority"]
    before = signature.replace(parameters=parameters)

    def without_priority(*args: Any, **given: Any) -> Any:
        before.bind(*args, **given)
        return newest(*args, **given)

    without_priority.__dict__["__signature__"] = before
    monkeypatch.setattr(LLM, "generate_async", without_priority)
    engine = opened()
    await collect(LocalAgg(engine), request(priority=0.75))
    await engine.probe(decode_request(SMALLEST_REQUEST))
    assert [call.get("priority") for call in engine.llm.calls_of("generate_async")] == [None, None]


# -- attention DP


def attention_dp(**engine_args: Any) -> Engine:
    return opened(enable_attention_dp=True, tensor_parallel_size=2, **engine_args)


async def test_a_request_runs_on_the_rank_that_the_router_chose() -> None:
    engine = attention_dp()
    await collect(LocalAgg(engine), request(routing={"dp_rank": 1}))
    (call,) = engine.llm.calls_of("generate_async")
    assert call["scheduling_params"].attention_dp_rank == 1
    assert call["scheduling_params"].attention_dp_relax is False
    with pytest.raises(InvalidRequestError, match=r"routing\.dp_rank: 2"):
        await collect(LocalAgg(engine), request(routing={"dp_rank": 2}))


async def test_dp_rank_is_not_passed_to_another_worker() -> None:
    raw = DYNAMO.encode(request(routing={"dp_rank": 1}), PREFILL)
    assert decode_request(raw).dp_rank is None


async def test_each_rank_has_events_and_load_of_its_own() -> None:
    engine = attention_dp(kv_cache_config={"event_buffer_max_size": 10, "tokens_per_block": 4})
    sinks = [RecordingEventSink(), RecordingEventSink()]
    events, load = CacheEvents(2, 4, 10), RecordingLoadSink()
    openers = {rank: [partial(next, iter([sink]))] for rank, sink in enumerate(sinks)}
    await KvEventForwarder(events, openers, DynamoMetrics(WorkerConfig(model="m"), 100)).start()
    tokens = [{"type": "unique_token", "token_id": n, "token_extra_id": 0} for n in range(4)]
    blocks = [{"type": "stored_block", "block_hash": 5, "tokens": tokens, "cache_level": 0}]
    store = {"type": "stored", "parent_hash": None, "blocks": blocks}
    remove = {"type": "removed", "block_hashes": [5]}
    engine.llm.kv_cache_events = [
        {"event_id": number, "window_size": None, "attention_dp_rank": rank, "data": data}
        for rank, number, data in ((0, 0, store), (1, 0, store), (1, 1, remove))
    ]
    events.receive(engine.llm.get_kv_cache_events(timeout=0))
    stored = Stored([0, 1, 2, 3], [4], [5], None, None)
    assert [sink.events for sink in sinks] == [[stored], [stored, Removed([5])]]

    await StatsForwarder(Statistics(), load, num_ranks=2).start()
    assert load.loads == [(0, 0), (1, 0)]


async def test_cached_block_dropped_by_one_rank_stays_on_others() -> None:
    cached = CachedPrefixes(4)
    for rank in (0, 1):
        cached.of_rank(rank).publish_stored([1, 2, 3, 4], [4], [9])
    cached.of_rank(1).publish_removed([9])
    prompt = [1, 2, 3, 4, 5]
    assert [cached.num_cached(prompt, None, rank) for rank in (None, 0, 1)] == [4, 4, 0]


async def test_attention_dp_with_an_engine_that_takes_no_rank_is_refused() -> None:
    engine = attention_dp()
    api = replace(engine.api, scheduling_params=None)
    with pytest.raises(ConfigError, match="enable_attention_dp"):
        Engine(api, engine.llm, None)


# -- one place says what happens without


def test_capabilities_table_of_the_page_matches_the_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "tensorrt-llm.md").read_text()
    for capability in CAPABILITIES:
        assert f"| {capability.name} | {capability.without} |" in text


async def test_stand_in_has_the_capabilities_of_tensorrt_llm() -> None:
    assert [each.name for each in CAPABILITIES if each in opened().capabilities] == [
        "take a rank of attention DP",
        "take a priority",
    ]


@pytest.mark.parametrize("first", [None, []])
async def test_a_handoff_without_its_first_token_reaches_no_engine(first: list[int] | None) -> None:
    """TensorRT-LLM's loop takes the first one of the list, and ends with an IndexError."""
    handoff = await LocalPrefill(opened())(asked := request(), FakeContext())
    passed = handoff.result
    assert passed is not None
    bare = msgspec.structs.replace(
        passed, disaggregated_params=passed.disaggregated_params | {"first_gen_tokens": first}
    )
    engine = opened()
    with pytest.raises(HandoffRefusedError, match="first_gen_tokens"):
        engine.start_decode(msgspec.structs.replace(asked, prefill_result=bare))
    assert engine.llm.results == []


@pytest.mark.parametrize("strategy", ORDERS)
async def test_a_decode_names_the_id_by_which_the_python_transceiver_finds_kv(strategy: str) -> None:
    """The engine's own answer to the prefill tells it under another name."""
    transceiver = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
    pair = Both(strategy, cache_transceiver_config=transceiver).day_one(strategy)
    assert tokens_of(await collect(pair.generate, request())) == expected_tokens(5)
    assert kinds(pair.decode) == ["generation_only"]
    (asked,), (fetched,) = (llm.calls_of("generate_async") for llm in (pair.prefill, pair.decode))
    given, found = (call["disaggregated_params"].disagg_request_id for call in (asked, fetched))
    assert found == given is not None
