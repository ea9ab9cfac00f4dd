"""Reading ahead: many outputs become one chunk when the reader is late, and nothing else changes."""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import joined, request
from trtllm_disagg.engines.recording.llm import LLM, RequestError, SamplingParams, Script
from trtllm_disagg.handlers import outputs
from trtllm_disagg.handlers.outputs import FewTicksLater, Notify, OutputCursor, at_once, newest_states
from trtllm_disagg.types import TokenChunk

pytestmark = pytest.mark.usefixtures("no_leaks")

PROMPT = request().token_ids


def start(script: Script, max_tokens: int = 12, logprobs: int | None = None) -> Any:
    llm = LLM(model="org/model")
    llm.scripts.append(script)
    return llm.generate_async(
        PROMPT, SamplingParams(max_tokens=max_tokens, logprobs=logprobs), streaming=True
    )


def ignore() -> None:
    pass


def never_cancelled(reading: object, result: object) -> None:
    """The engine of these tests does not die."""


async def chunks_of(result: Any, pauses: list[int], notify: Notify = at_once) -> list[TokenChunk]:
    """A client that lets `pauses[i]` turns of the event loop go by before it reads on."""
    cursor = OutputCursor(len(PROMPT))
    chunks: list[TokenChunk] = []
    async with aclosing(newest_states(result, ignore, never_cancelled, notify)) as states:
        async for state in states:
            chunks += cursor.advance(state)
            for _ in range(pauses[len(chunks) % len(pauses)]):
                await asyncio.sleep(0)
    return chunks


@given(
    pauses=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    max_tokens=st.integers(1, 20),
    logprobs=st.sampled_from([None, 1, 3]),
)
async def test_answer_does_not_depend_on_the_readers_delays(
    pauses: list[int], max_tokens: int, logprobs: int | None
) -> None:
    late = await chunks_of(start(Script(), max_tokens, logprobs), pauses)
    whole = [*OutputCursor(len(PROMPT)).advance(await start(Script(), max_tokens, logprobs).aresult())]
    assert joined(late) == joined(whole)
    assert [chunk.finish_reason for chunk in late[:-1]] == [None] * (len(late) - 1)
    assert all(chunk.completion_usage is None for chunk in late[1:-1])


async def test_outputs_that_came_while_the_reader_waited_are_one_chunk() -> None:
    noticed: list[int] = []
    async with aclosing(
        newest_states(start(Script(), 6), lambda: noticed.append(1), never_cancelled)
    ) as states:
        await anext(states)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(noticed) == 1, "the callback is for the first of them"
        assert len((await anext(states)).outputs[0].token_ids) == 6


async def test_single_token_is_delivered_at_once() -> None:
    gate = asyncio.Semaphore(0)
    async with aclosing(newest_states(start(Script(gate=gate)), ignore, never_cancelled)) as states:
        for length in range(1, 6):
            gate.release()
            state = await asyncio.wait_for(anext(states), 5)
            assert len(state.outputs[0].token_ids) == length
        for _ in range(7):
            gate.release()


@pytest.mark.parametrize("notify", [at_once, lambda event: None], ids=["at once", "without a notice"])
async def test_an_error_comes_behind_the_tokens_before_it(notify: Notify) -> None:
    lengths = []
    result = start(Script(error=RequestError("boom"), error_at=5))

    async def read_all() -> None:
        async with aclosing(newest_states(result, ignore, never_cancelled, notify)) as states:
            async for state in states:
                lengths.append(len(state.outputs[0].token_ids))

    with pytest.raises(RequestError, match="boom"):
        await read_all()
    assert lengths[-1:] in ([5], [])
    assert lengths or notify is not at_once


async def test_closing_the_reader_cancels_the_read_ahead_task() -> None:
    gate = asyncio.Semaphore(1)
    async with aclosing(newest_states(start(Script(gate=gate)), ignore, never_cancelled)) as states:
        await anext(states)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "read-ahead"]


async def test_events_are_set_together_after_the_turns() -> None:
    later = FewTicksLater(3)
    first, second = asyncio.Event(), asyncio.Event()
    later(first)
    await asyncio.sleep(0)
    later(second)
    later(second)
    await asyncio.sleep(0)
    assert not first.is_set()
    await asyncio.sleep(0)
    assert first.is_set()
    assert second.is_set()
    again = asyncio.Event()
    later(again)
    for _ in range(3):
        assert not again.is_set()
        await asyncio.sleep(0)
    assert again.is_set()


@pytest.mark.parametrize(("seconds", "turns"), [(1e-6, 16), (1e-3, 128)], ids=["idle", "busy"])
async def test_a_busy_loop_turns_often_and_an_idle_one_is_not_waited_for(seconds: float, turns: int) -> None:
    event, clock = asyncio.Event(), itertools.count()
    FewTicksLater(128, lambda: next(clock) * seconds)(event)
    for _ in range(turns):
        assert not event.is_set()
        await asyncio.sleep(0)
    assert event.is_set()


async def test_outputs_of_a_few_turns_are_one_chunk_when_the_notice_is_late() -> None:
    chunks = await chunks_of(start(Script(), 12), [0], FewTicksLater(5))
    assert 1 < len(chunks) < 12
    assert joined(chunks) == joined(await chunks_of(start(Script(), 12), [0]))


@pytest.mark.parametrize(
    ("step", "chunks"), [(5e-3, 3), (1e-4, 1)], ids=["steps of an engine", "ready tokens"]
)
async def test_an_output_a_step_after_the_one_before_waits_for_no_notice(step: float, chunks: int) -> None:
    times = itertools.count()
    states = newest_states(
        start(Script(), 3), ignore, never_cancelled, lambda event: None, lambda: next(times) * step
    )
    async with aclosing(states):
        assert len([state async for state in states]) == chunks


async def test_the_end_of_an_answer_waits_for_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "STEP_SECONDS", math.inf)
    (chunk,) = await chunks_of(start(Script(), 12), [0], lambda event: None)
    assert len(chunk.token_ids) == 12
