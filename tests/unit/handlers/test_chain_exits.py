"""Any request, failure and moment to leave: the right tokens so far, no KV left behind, nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.handling import STRATEGIES, expected_tokens, request, tokens_of
from tests.support.recording_pair import Pair, leftover_tasks, make_pair
from tests.support.stage_client import FakeContext
from trtllm_disagg.engines.recording.llm import LLM, RequestError, Script
from trtllm_disagg.engines.recording.result import EOS_TOKEN
from trtllm_disagg.errors import DisaggError, RequestCancelledError
from trtllm_disagg.types import TokenChunk


@dataclass(frozen=True)
class Course:
    """What happens to one request."""

    strategy: str
    max_tokens: int
    eos_at: int | None
    prefill_fails: bool
    decode_fails_at: int | None
    # After so many chunks, and so many turns of the event loop, it ends in this way.
    leaves: str
    after_chunks: int
    after_ticks: int
    falls_back: bool

    @property
    def whole_answer(self) -> list[int]:
        tokens = expected_tokens(self.max_tokens)
        return tokens if self.eos_at is None else tokens[: self.eos_at]

    @property
    def can_fall_back(self) -> bool:
        """A script ends one request's answer only, so a fallback would get another one."""
        return self.falls_back and self.eos_at is None and self.strategy != "router"

    @property
    def settings(self) -> dict[str, Any]:
        if self.can_fall_back or self.strategy == "router":
            return {}
        return {"max_tries": 1, "on_missing_stage": "fail"}

    @property
    def script(self) -> list[int] | None:
        if self.eos_at is None:
            return None
        return [*expected_tokens(self.eos_at), EOS_TOKEN]


courses = st.builds(
    Course,
    strategy=st.sampled_from(STRATEGIES),
    max_tokens=st.integers(1, 6),
    eos_at=st.none() | st.integers(0, 5),
    prefill_fails=st.sampled_from([False, False, False, True]),
    decode_fails_at=st.none() | st.integers(0, 4),
    leaves=st.sampled_from(["never", "closes", "stops", "is cancelled"]),
    after_chunks=st.integers(0, 6),
    after_ticks=st.integers(0, 25),
    falls_back=st.booleans(),
)


@settings(max_examples=400)
@given(courses)
def test_every_exit_of_a_chain_fetches_or_releases_the_kv_once(course: Course) -> None:
    asyncio.run(run(course))


async def run(course: Course) -> None:
    LLM.forget_instances()
    pair = make_pair(course.strategy, **course.settings)
    set_scripts(pair, course)
    context = FakeContext()
    seen: list[TokenChunk] = []
    chunks = pair.generate(request(course.max_tokens), context)
    reader = asyncio.create_task(read(chunks, seen, course, context))
    if course.leaves == "is cancelled":
        for _ in range(course.after_ticks):
            await asyncio.sleep(0)
        reader.cancel()
    (outcome,) = await asyncio.gather(reader, return_exceptions=True)
    await chunks.aclose()
    await pair.idle()
    left = await leftover_tasks()

    assert left == set()
    # Dynamo's router keeps no duty: what it does not hand on ends with its lease.
    if course.strategy != "router":
        assert len(LLM.kv_store) == 0
    check_answer(course, seen, outcome)
    check_aborts(pair)


def set_scripts(pair: Pair, course: Course) -> None:
    tokens = course.script
    error = RequestError("prefill") if course.prefill_fails else None
    pair.prefill.scripts.append(Script(tokens=tokens, error=error))
    error = None if course.decode_fails_at is None else RequestError("decode")
    pair.decode.scripts.append(Script(tokens=tokens, error=error, error_at=course.decode_fails_at or 0))


async def read(
    chunks: AsyncGenerator[TokenChunk, None], seen: list[TokenChunk], course: Course, context: FakeContext
) -> None:
    if course.leaves == "stops":
        asyncio.get_running_loop().call_soon(stop_later, context, course.after_ticks)
    async for chunk in chunks:
        seen.append(chunk)
        if course.leaves == "closes" and len(seen) == course.after_chunks:
            return


def stop_later(context: FakeContext, turns: int) -> None:
    if turns:
        asyncio.get_running_loop().call_soon(stop_later, context, turns - 1)
    else:
        context.stop()


def check_answer(course: Course, seen: list[TokenChunk], outcome: BaseException | None) -> None:
    tokens = tokens_of(seen)
    assert tokens == course.whole_answer[: len(tokens)]
    ends = [chunk for chunk in seen if chunk.finish_reason is not None]
    assert ends == seen[-1:] or ends == []
    if isinstance(outcome, RequestCancelledError):
        assert course.leaves == "stops"
    elif isinstance(outcome, DisaggError):
        assert str(outcome) in ("prefill", "decode")
        assert course.prefill_fails or course.decode_fails_at is not None
    elif course.leaves == "never":
        assert outcome is None
        assert tokens == course.whole_answer
        assert len(ends) == 1
    elif isinstance(outcome, asyncio.CancelledError):
        assert course.leaves == "is cancelled"
    else:
        assert outcome is None


def check_aborts(pair: Pair) -> None:
    for result in (*pair.prefill.results, *pair.decode.results):
        assert len(result.aborts) <= 1
    for result in pair.decode.results:
        whole = result.request_type == "context_and_generation"  # no KV comes to it
        assert whole or 0 not in result.aborts, "aborted while its KV was on its way"
