"""The handler of an endpoint: answers pushed to Dynamo's sender, first tokens, and health probes."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo.llm import exceptions as dynamo_errors

from tests.support.handling import raw_request, until
from tests.support.stage_client import FakeContext
from trtllm_disagg.dynamo_runtime.handler import PROBE, Handler, health_check_payload
from trtllm_disagg.dynamo_runtime.pushed_answers import BUFFERED, WAITING
from trtllm_disagg.errors import ConfigError, InvalidRequestError, OverloadedError
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_request

MANY = BUFFERED + 100


class Sender:
    """Dynamo's ResponseSender. `before` is called with the number of those that were sent."""

    def __init__(self, before: Callable[[int], object] = lambda sent: None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.is_closed = False
        self._before = before

    def send(self, answer: dict[str, Any]) -> None:
        self._before(len(self.sent))
        self.sent.append(answer)

    def close(self) -> None:
        self.is_closed = True

    @property
    def tokens(self) -> list[int]:
        return [token for answer in self.sent for token in answer["token_ids"]]


def counting(number: int, error: Exception | None = None) -> Generate:
    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        for token in range(number):
            yield TokenChunk([token])
        if error is not None:
            raise error

    return generate


async def waited_for(begun: Any) -> asyncio.Future[Any]:
    """As Dynamo does it: by a callback."""
    ended = asyncio.get_running_loop().create_future()
    asyncio.ensure_future(begun).add_done_callback(ended.set_result)
    first: asyncio.Future[Any] = await ended
    return first


async def push(generate: Generate, sender: Sender, context: FakeContext | None = None, **keys: Any) -> None:
    handler = Handler(generate, dict).function
    answers = handler(raw_request(**keys), context=context or FakeContext(), response_sender=sender)
    assert [each async for each in answers] == []


def test_dynamo_finds_the_senders_name() -> None:
    """It looks for it once, when the endpoint is served."""
    names = inspect.signature(Handler(counting(1), dict).function).parameters
    assert {"context", "response_sender"} <= names.keys()


async def test_answers_are_sent_and_without_a_sender_yielded() -> None:
    """Dynamo's health probes come so, and all that an older Dynamo brings."""
    handler = Handler(counting(3), dict).function
    answers = [each async for each in handler(raw_request(), context=FakeContext())]
    sender = Sender()
    await push(counting(3), sender)
    assert answers == sender.sent == [{"token_ids": [token]} for token in range(3)]
    assert sender.is_closed


@pytest.mark.parametrize("error", [InvalidRequestError("n=2"), OverloadedError("full")])
async def test_an_error_that_the_log_has_reaches_dynamo_without_a_traceback(error: Exception) -> None:
    """It prints the traceback of what the first answer, for which it waits as for a Future, raises."""
    first = await waited_for(
        Handler(counting(0, error), dict).function(raw_request(), FakeContext()).__anext__()
    )
    failure = first.exception()
    assert str(error) in str(failure)
    assert failure is not None
    assert failure.__traceback__ is None


@pytest.mark.parametrize("after", [2, MANY])
async def test_a_reader_that_is_gone_ends_the_answer_without_an_error(after: int) -> None:
    """Dynamo prints the traceback of each exception, and clients leave all the time."""
    is_closed = False
    context = FakeContext()

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        nonlocal is_closed
        try:
            while True:
                yield TokenChunk([1])
        finally:
            is_closed = True

    def gone(sent: int) -> None:
        if sent == after:
            context.stop()  # as Dynamo does, before it raises
            raise RuntimeError("response stream is closed")

    await push(generate, Sender(gone), context)
    assert is_closed


@pytest.mark.parametrize("after", [2, MANY])
async def test_an_answer_that_cannot_be_sent_to_its_reader_is_an_error(after: int) -> None:
    def broken(sent: int) -> None:
        if sent == after:
            raise RuntimeError("cannot encode this")

    with pytest.raises(RuntimeError, match="cannot encode this"):
        await push(counting(MANY + 1), Sender(broken))


@pytest.mark.parametrize("number", [MANY, 3])
async def test_a_client_that_does_not_read_holds_up_no_other_answer(number: int) -> None:
    """What may have to wait for it is a long answer, or one with large chunks."""
    is_read = threading.Event()
    most = number - 1
    large: dict[str, Any] = {"top_logprobs": [[]]} if number < MANY else {}

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        for token in range(number):
            yield TokenChunk([token], **large)

    unread, other = Sender(lambda sent: sent < most or is_read.wait(60)), Sender()
    pushing = asyncio.create_task(push(generate, unread))
    try:
        await until(lambda: len(unread.sent) == most)
        await push(counting(3), other)
        assert other.is_closed
        assert not unread.is_closed
    finally:
        is_read.set()
        await pushing
    assert unread.tokens == list(range(number))


async def test_a_client_that_does_not_read_stops_its_answers_source() -> None:
    """Of an answer without an end the worker keeps a bounded number of chunks."""
    is_read = threading.Event()
    made = 0

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        nonlocal made
        while made < BUFFERED + 10 * WAITING:
            made += 1
            yield TokenChunk([made])

    sender = Sender(lambda sent: sent < BUFFERED or is_read.wait(60))
    pushing = asyncio.create_task(push(generate, sender))
    try:
        await until(lambda: made > BUFFERED + WAITING)
        for _ in range(100):
            await asyncio.sleep(0)
        assert made <= BUFFERED + WAITING + 2
    finally:
        is_read.set()
        await pushing
    assert sender.tokens == list(range(1, BUFFERED + 10 * WAITING + 1))


@pytest.mark.parametrize("sent", [BUFFERED + 1, BUFFERED + 3 * WAITING])
async def test_an_answer_that_is_cancelled_leaves_no_thread(sent: int) -> None:
    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        for token in range(sent):
            yield TokenChunk([token])
        await asyncio.Event().wait()

    sender = Sender()
    pushing = asyncio.create_task(push(generate, sender))
    await until(lambda: len(sender.sent) == sent)
    pushing.cancel()
    with pytest.raises((asyncio.CancelledError, dynamo_errors.DynamoException)):
        await pushing
    await until(lambda: all(thread.name != "send" for thread in threading.enumerate()))
    assert not sender.is_closed


async def test_an_answer_that_is_dropped_in_a_thread_ends_on_the_event_loop() -> None:
    ended_in: list[int] = []
    has_ended = asyncio.Event()

    async def endless(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        try:
            yield TokenChunk([1])
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended_in.append(threading.get_ident())
            has_ended.set()

    handler = Handler(endless, dict).function
    dynamos: list[Any] = []

    def ask() -> Any:
        # As Dynamo does it: the attribute, once.
        dynamos.append(handler(raw_request(), FakeContext()).__anext__)
        return dynamos[0]()

    first = await waited_for(await asyncio.to_thread(ask))
    assert first.result()["token_ids"] == [1]
    await asyncio.to_thread(dynamos.clear)
    await asyncio.wait_for(has_ended.wait(), 10)
    assert ended_in == [threading.get_ident()]


# -- Dynamo's routers hear when a request has left its prefill behind


class Context(FakeContext):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[int | None] = []
        #: How many chunks had been handed on at each notice.
        self.notices: list[int] = []
        self.num_chunks = 0

    def notify_first_token(self) -> None:
        self.notices.append(self.num_chunks)


class Source:
    def bind(self, context: Any, dp_rank: int | None) -> None:
        context.ranks.append(dp_rank)


async def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    for tokens in ([], [5], [6]):
        yield TokenChunk(tokens)


async def served(raw: dict[str, Any], source: Source | None) -> Context:
    context = Context()
    handler = Handler(answer, dict, first_tokens=source).function
    async for _ in handler(raw, context):
        context.num_chunks += 1
    assert context.num_chunks == 3
    return context


async def test_request_is_bound_to_its_rank_and_the_first_token_is_notified_once() -> None:
    context = await served(raw_request(routing={"dp_rank": 3}), Source())
    assert (context.ranks, context.notices) == ([3], [2]), "behind the chunk that has it"


async def test_answer_of_one_chunk_ends_without_a_notice() -> None:
    async def at_once(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([5], finish_reason="length")

    context = Context()
    async for _ in Handler(at_once, dict, first_tokens=Source()).function(raw_request(), context):
        pass
    assert (context.ranks, context.notices) == ([None], [])


@pytest.mark.parametrize("stage", ["prefill", "decode", "whole"])
async def test_first_token_of_a_phase_request_is_not_notified(stage: str) -> None:
    context = await served(raw_request(phase_request={"phase": stage}), Source())
    assert (context.ranks, context.notices) == ([], [])


async def test_without_a_source_the_frontend_finds_out_by_itself() -> None:
    context = await served(raw_request(), None)
    assert (context.ranks, context.notices) == ([], [])


# -- health probes


GIVEN = '{"token_ids": [5], "stop_conditions": {"max_tokens": 2}}'
READ = {"token_ids": [5], "stop_conditions": {"max_tokens": 2}, PROBE: True}


def test_without_one_a_probe_is_one_token_before_all_others() -> None:
    payload = health_check_payload(None)
    request = decode_request(payload)
    assert (len(request.token_ids), request.stop.max_tokens, request.priority) == (1, 1, 1.0)
    assert payload[PROBE] is True


def test_health_check_payload_is_read_from_json_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(GIVEN)
    assert health_check_payload(GIVEN) == health_check_payload(f"@{tmp_path}/probe.json") == READ


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "JSON, or @FILE"),
        pytest.param("[" * 100_000, "JSON, or @FILE", id="too deep"),
        ("[1]", "a JSON object"),
        ("@~no_such_user/probe.json", "No such file"),
        ("@/nowhere/probe.json", "No such file"),
        ('{"prompt": "Hello"}', "token_ids"),
        ('{"token_ids": [1], "token_ids": [2]}', "token_ids is there twice"),
        ('{"token_ids": [1], "stop_conditions": {"max_tokens": "1"}}', "max_tokens"),
        (r'{"token_ids": [1], "routing": {"cache_salt": "\ud800"}}', "surrogates not allowed"),
    ],
)
def test_invalid_health_check_payload_is_refused_by_the_flags_name(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^--health-check-payload: .*{why}"):
        health_check_payload(given)
