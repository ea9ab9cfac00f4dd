"""Errors on their way through Dynamo: what it makes of them, and the real way from worker to worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from traceback import format_exception
from typing import Any

import pytest
from dynamo.llm import exceptions as dynamo_errors
from dynamo.runtime import Context

from tests.support.handling import raw_request
from tests.support.listed import Listed
from tests.support.loop_lag import may_wait
from tests.support.stage_client import FakeContext
from trtllm_disagg.common.reports import RateLimitedLog
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime import discovery, handler
from trtllm_disagg.dynamo_runtime.discovery import DynamoDirectory
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo, to_dynamo
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.dynamo_runtime.pushed_answers import pushed
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    EngineError,
    HandoffRefusedError,
    InvalidRequestError,
    KvTransferError,
    OverloadedError,
    PeerUnavailableError,
    RequestCancelledError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

#: Our error, what Dynamo is given for it, how it arrives at the other worker.
CROSSINGS: list[tuple[DisaggError, type[Exception], type[DisaggError]]] = [
    (InvalidRequestError("n=2: no"), dynamo_errors.InvalidArgument, InvalidRequestError),
    (HandoffRefusedError("n=2: no"), dynamo_errors.InvalidArgument, HandoffRefusedError),
    (ConfigError("n=2: no"), dynamo_errors.InvalidArgument, InvalidRequestError),
    (OverloadedError("n=2: no"), dynamo_errors.HttpError, OverloadedError),
    (PeerUnavailableError("n=2: no"), dynamo_errors.CannotConnect, PeerUnavailableError),
    (KvTransferError("n=2: no"), dynamo_errors.CannotConnect, PeerUnavailableError),
    (StageTimeoutError("n=2: no"), dynamo_errors.ConnectionTimeout, StageTimeoutError),
    (RequestCancelledError("n=2: no"), dynamo_errors.CannotConnect, PeerUnavailableError),
    (WorkerLeavingError("n=2: no"), dynamo_errors.EngineShutdown, PeerUnavailableError),
    (EngineError("n=2: no"), dynamo_errors.Unknown, EngineError),
]


def failing(error: Exception | None, chunks_before: int = 0) -> Generate:
    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        for _ in range(chunks_before):
            yield TokenChunk([5])
        if error is not None:
            raise error

    return generate


async def handled(generate: Generate, context: FakeContext | None = None) -> list[dict[str, Any]]:
    handler = Handler(generate, lambda: {"role": "decode"}).function
    return [answer async for answer in handler(raw_request(), context=context or FakeContext())]


# -- to Dynamo


async def test_overload_errors_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler(failing(OverloadedError("the prefill queue is full")), dict).function
    for _ in range(3):
        with pytest.raises(dynamo_errors.HttpError):
            await anext(handler(raw_request(), FakeContext()))
    assert caplog.text.count("OverloadedError: the prefill queue is full") == 1


class SilentClient:
    async def direct(self, request: object, instance_id: int, **_: object) -> object:
        raise ConnectionError("reset")


async def test_an_instance_that_does_not_describe_itself_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await discovery.described(SilentClient(), 0xAB, RateLimitedLog(discovery.log)) is None
    assert "instance ab sent no description: PeerUnavailableError: " in caplog.text
    assert "reset" in caplog.text


@pytest.mark.parametrize(("error", "given", "_"), CROSSINGS, ids=lambda v: type(v).__name__)
async def test_a_handler_raises_dynamos_errors(error: DisaggError, given: type[Exception], _: type) -> None:
    """Without ours behind it: Dynamo prints what it gets with all tracebacks, for each bad request."""
    with pytest.raises(given, match="n=2: no") as caught:
        await handled(failing(error, chunks_before=1))
    assert type(caught.value) is given
    if isinstance(error, OverloadedError):
        assert getattr(caught.value, "code", None) == OverloadedError.status == 529
    # Dynamo stops sending requests to an instance for seconds after these.
    leaving = (dynamo_errors.EngineShutdown, dynamo_errors.WorkerUnavailable, dynamo_errors.StreamIncomplete)
    assert issubclass(given, leaving) is isinstance(error, WorkerLeavingError)
    assert "Traceback" not in "".join(format_exception(caught.value)).partition("\n")[2]


async def test_unexpected_exception_fails_only_its_request_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(dynamo_errors.Unknown, match="KeyError: 'x'"):
        await handled(failing(KeyError("x")))
    assert "request request-1 failed unexpectedly" in caplog.text


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"token_ids": 5}, "token_ids"),
        *((body, "request: expected an object") for body in (None, 5, "text", [1])),
    ],
)
async def test_a_bad_request_is_refused_before_any_handler(body: Any, named: str) -> None:
    handler = Handler(failing(None), dict).function
    with pytest.raises(dynamo_errors.InvalidArgument, match=named):
        await anext(handler(body, context=FakeContext()))


class Endless(list[int]):
    """A prompt that cannot be looked at."""

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("its tokens were looked at")


@pytest.mark.parametrize("tokens", [Endless(), [5] * 65, bytes(4 * 65), [5] * 64, bytes(4 * 64)])
async def test_a_prompt_that_is_too_long_is_refused_before_its_tokens_are_looked_at(tokens: Any) -> None:
    handler = Handler(failing(None, chunks_before=1), dict, longest_prompt=64).function
    answers = handler(raw_request() | {"token_ids": tokens}, context=FakeContext())
    if len(tokens) in (64, 4 * 64):
        assert [chunk async for chunk in answers]
        return
    with pytest.raises(dynamo_errors.InvalidArgument, match=r"\d+ tokens; max_seq_len 64"):
        await anext(answers)


@pytest.mark.parametrize("error", [RequestCancelledError("gone"), KvTransferError("the lease ended")])
async def test_a_client_that_left_gets_no_error(error: DisaggError, caplog: pytest.LogCaptureFixture) -> None:
    """The other worker, which has lost the same client, may end the transfer first."""
    caplog.set_level(logging.INFO)
    context = FakeContext()
    context.stop()
    assert await handled(failing(error, chunks_before=1), context) == [{"token_ids": [5]}]
    assert [record.levelno for record in caplog.records] == [logging.INFO]


async def test_a_handler_that_is_cancelled_by_its_worker_hands_the_request_back() -> None:
    """The event loop of a process that ends cancels all that runs."""
    waiting = asyncio.Event()

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        waiting.set()
        await asyncio.Event().wait()
        yield TokenChunk([5])

    answering = asyncio.create_task(handled(generate))
    await waiting.wait()
    answering.cancel()
    with pytest.raises(dynamo_errors.EngineShutdown):
        await answering


# -- from Dynamo: the texts that were measured


STREAM_ENDED = "Stream ended before generation completed"
NO_WORKERS = "No workers available for endpoint ns/comp/ep"
#: Dynamo's own words when a killed worker does not answer; no stage has run out of its time.
NO_CONNECT = "TCP connect to 127.0.0.1:9 timed out"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("InvalidRequest: ValueError: bad"), InvalidRequestError, "bad"),
        (ValueError("Internal: RuntimeError: boom"), EngineError, "boom"),
        (ValueError("Internal: boom: why"), EngineError, "boom: why"),
        (ValueError("Internal: KeyError: 'x'\nline 2"), EngineError, "'x'\n  line 2"),
        (ValueError("Unavailable: engine is gone"), PeerUnavailableError, "engine is gone"),
        (ValueError(f"Unavailable: {STREAM_ENDED}"), PeerUnavailableError, STREAM_ENDED),
        (Exception(f"Unavailable: {NO_WORKERS}"), PeerUnavailableError, NO_WORKERS),
        (Exception("Unavailable: instance_id=12 not found"), PeerUnavailableError, "=12 not found"),
        (ValueError("Cancelled: left"), PeerUnavailableError, "left"),
        (ValueError("DeadlineExceeded: StageTimeoutError: slow"), StageTimeoutError, "slow"),
        (ValueError(f"DeadlineExceeded: {NO_CONNECT}"), PeerUnavailableError, NO_CONNECT),
        (ValueError('RateLimited: {"message":"full","code":429}'), OverloadedError, "full"),
        (ValueError('CapacityExhausted: {"message":"full","code":529}'), OverloadedError, "full"),
        (ValueError("CapacityExhausted: []"), OverloadedError, "[]"),
        (dynamo_errors.InvalidArgument("'HandoffRefusedError: '"), InvalidRequestError, "Error: '"),
        (Exception("what is this"), PeerUnavailableError, "cannot be reached: what is this"),
        (ConnectionError("refused"), PeerUnavailableError, "cannot be reached: refused"),
    ],
)
def test_a_peers_error_arrives_as_the_kind_that_it_was(
    error: Exception, kind: type[DisaggError], message: str
) -> None:
    translated = from_dynamo(error)
    assert type(translated) is kind
    assert str(translated).endswith(message)


# -- the real way: Dynamo's request plane, in this process


@asynccontextmanager
async def served(generate: Generate, role: Role = Role.DECODE) -> AsyncIterator[DynamoDirectory]:
    """A client of a second stage that answers so."""
    strategy = "prefill_first" if role is Role.DECODE else "decode_first"
    config = WorkerConfig(model="m", role=role, strategy=strategy, discovery_backend="mem")
    # Dynamo starts its threads, and waits for them.
    with may_wait():
        worker = Listed(config)
    serving = asyncio.create_task(worker.serve(generate, lambda: {"role": "decode"}))
    try:
        await worker.runtime.wait_for_second_stage(config.endpoint_id)
        yield await worker.runtime.stage(config.endpoint_id)
    finally:
        worker.runtime.shutdown()
        await serving


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL], ids=["asked for each answer", "pushes"])
@pytest.mark.parametrize("chunks_before", [0, 1])
async def test_every_error_crosses_the_request_plane_as_itself(chunks_before: int, role: Role) -> None:
    current: list[Exception] = []

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in failing(current[0], chunks_before)(request, context):
            yield chunk

    async with served(generate, role) as client:
        for error, _, arrives_as in CROSSINGS:
            current[:] = [error]
            got: list[Any] = []
            with pytest.raises(DisaggError) as caught:
                await read(client, got)
            assert type(caught.value) is arrives_as
            assert str(caught.value) == "n=2: no"
            assert got == [{"token_ids": [5]}] * chunks_before
        assert await client.instance(client.instance_ids()[0]).describe() == {"role": "decode"}


async def read(client: DynamoDirectory, into: list[Any]) -> None:
    instance = client.instance(client.instance_ids()[0])
    async for answer in instance.call(raw_request(), Context()):
        into.append(answer)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_answers_are_pushed(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo asks for each one where it does not see that a handler takes a sender, and does not say so."""
    num_pushed = 0

    def counted(*arguments: Any) -> AsyncGenerator[Any, None]:
        nonlocal num_pushed
        num_pushed += 1
        return pushed(*arguments)

    monkeypatch.setattr(handler, "pushed", counted)
    got: list[Any] = []
    async with served(failing(None, chunks_before=3), role) as client:
        await read(client, got)
    assert got == [{"token_ids": [5]}] * 3
    assert num_pushed == 1


async def test_kubernetes_outside_of_a_pod_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_NAME", raising=False)
    with pytest.raises(ConfigError, match="--discovery-backend kubernetes: POD_NAME not available"):
        Runtime(WorkerConfig(model="m", discovery_backend="kubernetes"))


# -- what an error says may have been written by a client: it goes on as text


FORGED = "bad\n12:00:00.000 ERROR root: all is lost\r\x1b[2J\x9b31m\u2028end"


@pytest.mark.parametrize("kind", [InvalidRequestError, ConfigError, DisaggError])
def test_control_characters_in_a_message_are_shown_not_sent(kind: type[DisaggError]) -> None:
    text = str(kind(FORGED))
    assert "\\x1b[2J\\x9b31m\\u2028end" in text
    assert all(character.isprintable() for character in text.replace("\n", ""))


def test_a_further_line_of_a_message_is_no_line_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(__name__).warning("request: %s", InvalidRequestError(FORGED))
    first, *further = caplog.text.splitlines()
    assert first.endswith("request: bad")
    assert further
    assert all(line.startswith("  ") for line in further)


def test_a_message_keeps_its_lines_and_tabs_on_its_way_over_two_workers() -> None:
    """A parser points at the place of a mistake."""
    text = 'at 1(8):\n    "[0-9\n    ^\n\tunclosed'
    once = str(InvalidRequestError(text))
    assert once == 'at 1(8):\n    "[0-9\n    ^\n  \tunclosed'
    sent = to_dynamo(InvalidRequestError(text))
    assert isinstance(sent, dynamo_errors.InvalidArgument)
    assert str(from_dynamo(sent)) == once


def test_a_message_without_them_is_as_it_was_given() -> None:
    assert str(InvalidRequestError("n=2: é 你 🚀 'x\\y'")) == "n=2: é 你 🚀 'x\\y'"
    assert str(DisaggError()) == ""
