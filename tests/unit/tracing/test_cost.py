"""What tracing costs: so many calls a request, and none for a token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.handling import ORDERS, collect, request
from tests.support.recording_pair import make_pair
from tests.support.trying import logged
from trtllm_disagg.tracing.spans import NO_SPAN, Attributes, Recording, Span
from trtllm_disagg.tracing.tracer import Tracer


class CountedSpan(Span):
    """Each use of a span, of a request that is traced or not."""

    def __init__(self, uses: Counter[str], *, is_recording: bool) -> None:
        self._uses = uses
        self.is_recording = is_recording

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_uses")[name] += 1
        return object.__getattribute__(self, name)

    def child(self, name: str, attributes: Attributes = {}) -> Span:  # noqa: B006
        return self


class CountingTracer(Tracer):
    def __init__(self, *, is_recording: bool) -> None:
        super().__init__()
        self.uses: Counter[str] = Counter()
        self._is_recording = is_recording

    def begin(self, *_: object) -> Span:
        return CountedSpan(self.uses, is_recording=self._is_recording)


@pytest.mark.parametrize("is_recording", [True, False])
@pytest.mark.parametrize("strategy", ORDERS)
async def test_span_operations_do_not_grow_with_the_answer(strategy: str, is_recording: bool) -> None:
    uses = []
    for max_tokens in (150, 400):
        tracer = CountingTracer(is_recording=is_recording)
        generate = logged(make_pair(strategy).generate, "first", tracer=tracer)
        chunks = await collect(generate, request(max_tokens))
        assert sum(len(chunk.token_ids) for chunk in chunks) == max_tokens
        uses.append(tracer.uses)
    assert uses[0] == uses[1]
    assert uses[0]["child"] > 3


async def test_a_request_that_is_not_traced_has_one_span_for_all_of_it() -> None:
    asked = request()
    await collect(logged(make_pair("prefill_first").generate, "first"), asked)
    assert asked.trace.root is NO_SPAN
    assert asked.within(NO_SPAN) is asked
    recorded = Recording("0" * 31 + "1", lambda spans: None).root("request", None)
    assert asked.within(recorded).span is recorded
