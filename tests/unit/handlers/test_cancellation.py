"""A client that left aborts its request: once, and not while KV is on its way."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.support.handling import PROMPT, until
from tests.support.recording_pair import leftover_tasks, recording_engine
from tests.support.stage_client import FakeContext
from trtllm_disagg.engines.recording.llm import (
    LLM,
    DisaggregatedParams,
    RequestError,
    RequestOutput,
    SamplingParams,
    Script,
)
from trtllm_disagg.handlers.cancellation import POLL_SECONDS, AbortGuard
from trtllm_disagg.handlers.drain import in_background, num_in_background

pytestmark = pytest.mark.usefixtures("no_leaks")


def start(script: Script | None = None, params: DisaggregatedParams | None = None) -> RequestOutput:
    llm = LLM("m", cache_transceiver_config={"backend": "NIXL"})
    llm.scripts.append(script or Script())
    sampling = SamplingParams(max_tokens=9)
    return llm.generate_async(PROMPT, sampling, streaming=True, disaggregated_params=params)


def generation_only(script: Script | None = None) -> RequestOutput:
    state = LLM.kv_store.hold(list(PROMPT))
    params = DisaggregatedParams(request_type="generation_only", opaque_state=state, first_gen_tokens=[5])
    return start(script, params)


def guard_of(result: RequestOutput, context: FakeContext, *, deferred: bool = False) -> AbortGuard:
    return AbortGuard(recording_engine(), result, context, deferred=deferred)


class SeenContext(FakeContext):
    """Says when it was seen to be stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = asyncio.Event()

    def is_stopped(self) -> bool:
        if super().is_stopped():
            self.seen.set()
        return super().is_stopped()


async def test_background_work_that_fails_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    in_background(broken(), "drain of an unused handoff")
    await until(lambda: not num_in_background())
    assert caplog.messages == ["background work 'drain of an unused handoff' failed"]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("deferred", [False, True])
async def test_an_abort_reaches_the_result_once_and_a_deferred_one_when_it_may(deferred: bool) -> None:
    result = start()
    guard = guard_of(result, FakeContext(), deferred=deferred)
    guard.abort()
    assert result.aborts == ([] if deferred else [0])
    for _ in range(2):
        guard.may_abort()
        guard.abort()
    assert result.aborts == [0]


async def test_may_abort_without_an_abort_aborts_nothing() -> None:
    result = start()
    guard = guard_of(result, FakeContext(), deferred=True)
    guard.may_abort()
    assert result.aborts == []
    guard.abort()
    assert result.aborts == [0]


@pytest.mark.parametrize("before", [False, True])
async def test_a_stopped_context_aborts(before: bool) -> None:
    result, context = start(), FakeContext()
    if before:
        context.stop()
    with guard_of(result, context):
        if not before:
            await anext(result)
            context.stop()
            await until(lambda: result.aborts)
        await result.aresult()
    assert len(result.aborts) == 1
    assert result.outputs[0].finish_reason == "cancelled"


@pytest.mark.parametrize("time", ["first", "after one without a request"])
async def test_a_request_that_cannot_be_aborted_leaves_the_others_watched(time: str) -> None:
    def fails() -> None:
        raise RequestError("no abort")

    if time != "first":
        with guard_of(finished := start(), FakeContext()):
            await finished.aresult()
        await asyncio.sleep(2 * POLL_SECONDS)
    broken, result = start(), start()
    of_broken, of_result = SeenContext(), SeenContext()
    with suppress(RequestError), guard_of(broken, of_broken), guard_of(result, of_result):
        broken.abort = fails  # type: ignore[method-assign]
        of_broken.stop()
        await of_broken.seen.wait()
        of_result.stop()
        await of_result.seen.wait()
        assert result.aborts == [0]
    await broken.aresult()


async def test_a_finished_result_is_not_aborted() -> None:
    result, context = start(), FakeContext()
    with guard_of(result, context):
        await result.aresult()
    context.stop()
    await leftover_tasks()
    assert result.aborts == []


async def test_a_block_that_is_left_early_aborts_the_result() -> None:
    result = start()
    with guard_of(result, FakeContext()):
        await anext(result)
    assert result.aborts == [1]


async def test_an_error_that_ends_the_result_aborts_nothing() -> None:
    result = start(Script(error=RequestError("boom")))
    with pytest.raises(RequestError), guard_of(result, FakeContext()):
        await result.aresult()
    assert result.aborts == []


async def test_an_abort_waits_for_the_first_output() -> None:
    gate = asyncio.Semaphore(0)
    result, context = generation_only(Script(gate=gate)), SeenContext()

    async def read() -> None:
        with guard_of(result, context, deferred=True) as guard:
            async for _ in result:
                guard.may_abort()

    reader = asyncio.create_task(read())
    await leave_time()
    context.stop()
    await context.seen.wait()
    assert result.aborts == []
    gate.release()
    await reader
    assert result.aborts == [1]
    assert result.outputs[0].finish_reason == "cancelled"


async def test_abort_of_a_cancelled_decode_waits_until_the_kv_has_arrived() -> None:
    gate = asyncio.Semaphore(0)
    result = generation_only(Script(gate=gate))

    async def read() -> None:
        with guard_of(result, FakeContext(), deferred=True):
            await result.aresult()

    reader = asyncio.create_task(read())
    await leave_time()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert result.aborts == []
    assert len(LLM.kv_store) == 1
    gate.release()
    assert await leftover_tasks() == set()
    assert result.aborts == [1]
    assert len(LLM.kv_store) == 0


async def test_kv_that_never_arrives_for_a_cancelled_request_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    result = generation_only()
    LLM.kv_store.clear()
    with guard_of(result, FakeContext(), deferred=True):
        pass
    assert await leftover_tasks() == set()
    assert "a cancelled request has failed: RequestError" in caplog.text


async def leave_time() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
