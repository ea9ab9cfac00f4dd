"""The other stage without Dynamo: a handler in this process, or a script."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    HandoffRefusedError,
    InvalidRequestError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    RequestCancelledError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

# A request's context without Dynamo.


class FakeContext:
    """The part of Dynamo's Context that handlers use. `stop` acts like a client that disconnects."""

    def __init__(self, request_id: str = "request-1") -> None:
        self._id = request_id
        self._is_stopped = False
        self._on_stop: list[Callable[[], object]] = []

    def id(self) -> str:
        return self._id

    def trace_headers(self) -> dict[str, str] | None:
        """None: the request has no trace."""
        return None

    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            for callback in self._on_stop:
                callback()

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Calls `callback` at once if the client has already left."""
        if self._is_stopped:
            callback()
        else:
            self._on_stop.append(callback)

    stop_generating = stop

    def detached(self, id: str) -> FakeContext:
        return FakeContext(id)

    def child(self) -> FakeContext:
        """The other stage's context of this request; stops with this one, or alone."""
        child = FakeContext(self._id)
        self.on_stop(child.stop)
        return child


Raw = dict[str, Any]

#: Across processes an error keeps only its category; a refused handoff also its name.
_ARRIVES_AS: dict[str, type[DisaggError]] = {
    kind.category: kind
    for kind in (
        InvalidRequestError,
        OverloadedError,
        PeerUnavailableError,
        StageTimeoutError,
        RequestCancelledError,
        EngineError,
    )
}
_ARRIVES_AS[WorkerLeavingError.category] = PeerUnavailableError


def as_it_arrives(error: Exception) -> DisaggError:
    """A worker's error as its caller sees it."""
    if isinstance(error, HandoffRefusedError):
        arrived: DisaggError = HandoffRefusedError(str(error))
    elif isinstance(error, DisaggError):
        arrived = _ARRIVES_AS[error.category](str(error))
    else:
        arrived = EngineError(f"{type(error).__name__}: {error}")
    arrived.was_raised_there = not isinstance(error, RequestCancelledError)
    return arrived


@dataclass(slots=True)
class StageCall:
    """One call: a copy of the request, and the answer so far."""

    request: Raw
    context: FakeContext
    answers: list[Raw] = field(default_factory=list)


class RecordingStageClient:
    """Serves by the other stage's handler, as across the wire, or gives scripted answers and then raises. Records
    `calls`.
    """

    def __init__(
        self,
        serve: Generate | None = None,
        *,
        answers: Sequence[Any] = (),
        error: DisaggError | None = None,
        description: Raw | None = None,
    ) -> None:
        self.serve = serve
        self._answers = answers
        self._error = error
        self.description = description or {}
        self.instance_id = 1
        self._peers: set[asyncio.Task[None]] = set()
        self.calls: list[StageCall] = []
        self.notices: list[Raw] = []

    async def call(self, request: Raw, context: Any) -> AsyncGenerator[Raw, None]:
        context = context or FakeContext()
        call = StageCall(_across_the_wire(request), context)
        self.calls.append(call)
        stream = self._scripted(context) if self.serve is None else self._served(call)
        async with aclosing(stream) as answers:
            async for answer in answers:
                call.answers.append(answer)
                yield answer

    async def pick(self, request: GenerateRequest) -> RecordingStageClient:
        """Itself, the only instance."""
        if self.instance_id in request.avoid:
            raise NoInstanceError("no instance of the other stage is there")
        return self

    def instance_ids(self) -> Sequence[int]:
        return [self.instance_id]

    def instance(self, instance_id: int) -> RecordingStageClient:
        return self

    def check(self, request: GenerateRequest) -> None:
        """Ignores the request's wishes."""

    async def describe(self) -> Raw:
        return self.description

    async def notify(self, notice: Raw) -> None:
        self.notices.append(notice)
        if self.serve is not None:
            async with aclosing(self.serve(decode_request(notice), FakeContext())) as nothing:
                async for _ in nothing:
                    pass

    def serve_by(self, serve: Generate) -> None:
        """Serve by this handler from the next call on."""
        self.serve = serve

    def fails_with(self, error: DisaggError) -> None:
        """Raise `error` from the next call on, without serving it."""
        self.serve, self._error = None, error

    @property
    def requests(self) -> list[Raw]:
        return [call.request for call in self.calls]

    async def idle(self) -> None:
        """Wait until the other stage is idle."""
        while self._peers:
            await asyncio.gather(*self._peers)
            # Since Python 3.12, gathering done tasks does not yield, so their callbacks would never run.
            await asyncio.sleep(0)

    async def _scripted(self, context: FakeContext) -> AsyncGenerator[Raw, None]:
        for answer in self._answers:
            await asyncio.sleep(0)
            if context.is_stopped():
                return
            yield copy.deepcopy(answer)
        if self._error is not None:
            self._error.peer = self.instance_id
            raise self._error

    async def _served(self, call: StageCall) -> AsyncGenerator[Raw, None]:
        """Like Dynamo: a stopped context ends the iteration at once; leaving it stops the peer."""
        answers: asyncio.Queue[Raw | DisaggError | None] = asyncio.Queue()
        call.context.on_stop(lambda: answers.put_nowait(None))
        context = call.context.child()
        peer = asyncio.create_task(self._run_peer(call.request, context, answers))
        self._peers.add(peer)
        peer.add_done_callback(self._peers.discard)
        try:
            while (answer := await answers.get()) is not None and not call.context.is_stopped():
                if isinstance(answer, DisaggError):
                    answer.peer = self.instance_id
                    raise answer
                yield answer
        finally:
            if not peer.done():
                context.stop()

    async def _run_peer(
        self, request: Raw, context: FakeContext, answers: asyncio.Queue[Raw | DisaggError | None]
    ) -> None:
        assert self.serve is not None
        end: DisaggError | None = None
        try:
            async with aclosing(self.serve(decode_request(request, takes_images=True), context)) as chunks:
                async for chunk in chunks:
                    answers.put_nowait(_across_the_wire(encode_chunk(chunk)))
                    await asyncio.sleep(0)
                    if context.is_stopped():
                        break  # Dynamo drops the generator of a stopped request
        except Exception as error:
            if not (isinstance(error, RequestCancelledError) and context.is_stopped()):
                end = as_it_arrives(error)
        answers.put_nowait(end)


def _across_the_wire(message: Raw) -> Raw:
    """Raises for values outside JSON."""
    copied: Raw = json.loads(json.dumps(message, allow_nan=False))
    return copied


class Instances:
    """Instances in discovery: each client is one, numbered from 1."""

    def __init__(self, clients: Sequence[RecordingStageClient]) -> None:
        for number, client in enumerate(clients, start=1):
            client.instance_id = number
        self.clients = {client.instance_id: client for client in clients}

    def instance_ids(self) -> list[int]:
        return list(self.clients)

    def instance(self, instance_id: int) -> RecordingStageClient:
        return self.clients[instance_id]


class SayingInstance:
    """An instance with only a description. `said`: the description, an error, or None for no answer."""

    def __init__(self, instance_id: int, said: Any) -> None:
        self.instance_id = instance_id
        self.said = said
        self.times_asked = 0

    async def describe(self) -> Raw:
        self.times_asked += 1
        if self.said is None:
            await asyncio.Event().wait()
        if isinstance(self.said, Exception):
            raise self.said
        described: Raw = self.said
        return described

    def call(self, request: Raw, context: Any) -> AsyncGenerator[Raw, None]:
        raise AssertionError("this instance has only a description")

    async def notify(self, notice: Raw) -> None:
        """Ignores notices."""


class Described:
    """Instances with descriptions."""

    def __init__(self, count: int) -> None:
        self._instances = {i: SayingInstance(i, {}) for i in range(1, count + 1)}

    def instance_ids(self) -> list[int]:
        return list(self._instances)

    def instance(self, instance_id: int) -> SayingInstance:
        return self._instances[instance_id]
