"""A Generate, as Dynamo calls it; and what Dynamo's health probes send: a request, which this worker runs whole on its
own engine, whatever its role.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing, suppress
from functools import partial
from itertools import chain, repeat
from operator import call
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg import errors
from trtllm_disagg.commands import CONTROL, is_control
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.dynamo_runtime.error_mapping import to_dynamo
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

#: Marks such a request. It costs a token at least: an engine that says that it lives may be stuck.
PROBE = "trtllm_disagg.probe"

#: One token of a prompt of one, before all that waits.
_DEFAULT = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}, "priority": 1.0}
log = logging.getLogger(__name__)
#: A request with this key asks for the worker's description.
DESCRIBE = "trtllm_disagg.describe"
#: What a worker does with a control command, however little it looks like one. Raises a DisaggError.
HandleCommand = Callable[[Any], Awaitable[dict[str, Any]]]
#: Runs the request of a health probe. Raises a DisaggError when the engine does no work.
Probe = Callable[[GenerateRequest], Awaitable[None]]


Answer = dict[str, Any]
#: So many chunks of an answer find room on their way, however little its client reads. Sending more may have to wait,
#: which the event loop must not: a thread does it. A chunk with alternatives for each token is as large as dozens.
BUFFERED = 500
#: The thread is given so many chunks before it has sent them; then the answer's source waits.
WAITING = 64


class ResponseSender(Protocol):
    """Dynamo's, of one answer."""

    def send(self, answer: Answer, /) -> None:
        """Blocks while those before it find no room. Raises when the reader is gone."""
        ...

    def close(self) -> None:
        """The answer is whole."""
        ...


async def pushed(
    answers: AsyncGenerator[Answer, None], sender: ResponseSender
) -> AsyncGenerator[Answer, None]:
    """Yields nothing: Dynamo asks for the first element only, to have all of this run. An error ends the answer when
    it leaves here; nothing is closed then.
    """
    num_sent = 0
    async with aclosing(answers):
        async for answer in answers:
            if num_sent == BUFFERED or "top_logprobs" in answer:
                await _send_in_thread(answer, answers, sender)
                break
            sender.send(answer)
            num_sent += 1
    sender.close()
    nothing: tuple[Answer, ...] = ()
    for none in nothing:
        yield none


async def _send_in_thread(first: Answer, rest: AsyncGenerator[Answer, None], sender: ResponseSender) -> None:
    with closing(_SendingThread(sender)) as thread:
        await thread.send(first)
        async for answer in rest:
            await thread.send(answer)
        await thread.sent()


class _SendingThread:
    """Sends an answer's chunks in their order. A worker does not wait for it at its end: it may be blocked for ever."""

    def __init__(self, sender: ResponseSender) -> None:
        self._send = sender.send
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._has_room = asyncio.Event()
        self._end: asyncio.Future[None] = self._loop.create_future()
        Thread(target=self._run, name="send", daemon=True).start()

    async def send(self, answer: Answer) -> None:
        """Raises what sending an earlier one raised."""
        if self._answers.qsize() >= WAITING:
            self._has_room.clear()
            # The thread may have sent the last one before it could see that.
            if self._answers.qsize() >= WAITING:
                await self._has_room.wait()
        if self._end.done():
            self._end.result()
        self._answers.put(answer)

    async def sent(self) -> None:
        """All are. Raises what sending one of them raised."""
        self._answers.put(None)
        await self._end

    def close(self) -> None:
        """Nothing more is sent than what was given."""
        self._answers.put(None)
        if not self._end.cancel() and not self._end.cancelled():
            self._end.exception()  # seen: another error ends the answer

    def _run(self) -> None:
        try:
            for answer in iter(self._answers.get, None):
                self._send(answer)
                if not self._has_room.is_set() and self._answers.qsize() < WAITING:
                    self._tell(self._has_room.set)
            self._tell(self._settle, None)
        except Exception as error:
            self._tell(self._settle, error)

    def _settle(self, error: Exception | None) -> None:
        self._has_room.set()
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, *args)


class FirstTokens(Protocol):
    """Dynamo's FirstTokenSource: tells every router's replica that a request has left its prefill behind."""

    def bind(self, context: Any, dp_rank: int | None) -> None: ...


def health_check_payload(given: str | None) -> dict[str, Any]:
    """`given`: the setting of that name. Raises ConfigError for what is no request."""
    payload = _DEFAULT if given is None else _read(given)
    try:
        decode_request(payload)
    except InvalidRequestError as error:
        allowed = f"a request such as {json.dumps(_DEFAULT)} ({error})"
        raise ConfigError.bad_value(flag_of("health_check_payload"), given, allowed) from None
    return payload | {PROBE: True}


def _read(given: str) -> dict[str, Any]:
    flag = flag_of("health_check_payload")
    try:
        text = Path(given[1:]).expanduser().read_text() if given.startswith("@") else given
        payload = json.loads(text)
    except OSError as error:
        allowed = f"JSON, or @FILE with a file that can be read ({error.strerror})"
        raise ConfigError.bad_value(flag, given, allowed) from None
    except ValueError as error:
        raise ConfigError.bad_value(flag, given, f"JSON, or @FILE with it ({error})") from None
    if not isinstance(payload, dict):
        raise ConfigError.bad_value(flag, given, "a JSON object")
    return payload


async def answers_by_itself(request: GenerateRequest) -> None:
    """For a handler without an engine."""


async def refuse_control(raw: Any) -> dict[str, Any]:
    raise errors.InvalidRequestError("this worker takes no control commands")


def as_dynamo_handler(
    generate: Generate,
    describe: Callable[[], dict[str, Any]],
    handle_command: HandleCommand = refuse_control,
    longest_prompt: float = math.inf,
    probe: Probe = answers_by_itself,
    *,
    pushes: bool = False,
    first_tokens: FirstTokens | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls with each request. It finds the parameters behind the first by their names. `first_tokens`
    None: this Dynamo, or this kind of worker, has no such thing.

    With `pushes` Dynamo since 1.6 brings a sender with what comes over the network; otherwise it asks for each answer.
    """

    async def handle(request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        if DESCRIBE in request:
            yield describe()
            return
        try:
            if PROBE in request:
                await probe(decode_request(request, longest_prompt))
                yield describe()
                return
            if is_control(request):
                yield await handle_command(request[CONTROL])
                return
            asked = decode_request(request, longest_prompt, context.trace_headers())
            has_begun = first_tokens is None or asked.phase_request is not None
            if first_tokens is not None and not has_begun:
                first_tokens.bind(context, asked.dp_rank)
            async with aclosing(generate(asked, context)) as chunks:
                async for chunk in chunks:
                    if not has_begun and chunk.token_ids:
                        has_begun = True
                        context.notify_first_token()
                    yield encode_chunk(chunk)
        except asyncio.CancelledError:
            if context.is_stopped():
                raise
            # Dynamo would tell the client that it left (499).
            raise to_dynamo(errors.WorkerLeavingError("this worker ends")) from None
        except errors.DisaggError as error:
            if isinstance(error, errors.RequestCancelledError) and context.is_stopped():
                log.info("request %s: %s", context.id(), error)
                return
            # A flood would fill the log; admission tells of it now and then.
            level = logging.DEBUG if isinstance(error, errors.OverloadedError) else logging.WARNING
            log.log(level, "request %s: %s: %s", context.id(), type(error).__name__, error)
            # Dynamo prints the traceback of what it gets; of an error that is expected the line above says it all.
            raise to_dynamo(error) from None
        except Exception as error:
            # A bug of ours fails this request, not the worker.
            log.exception("request %s failed unexpectedly", context.id())
            raise dynamo_errors.Unknown(f"{type(error).__name__}: {error}") from error

    def handle_asked(request: dict[str, Any], context: Any) -> AsyncGenerator[Answer, None]:
        return _BegunOnLoop(handle(request, context))

    def handle_pushing(
        request: dict[str, Any], context: Any, response_sender: Any = None
    ) -> AsyncGenerator[Answer, None]:
        answers = handle(request, context)
        return _BegunOnLoop(answers if response_sender is None else pushed(answers, response_sender))

    return handle_pushing if pushes else handle_asked


class _BegunOnLoop(PerRequestStream[Answer]):
    """Dynamo asks for answers, and drops them, in threads of its own. Python closes a generator on the event loop that
    has begun it; any other one in the thread that drops it, where nothing can be awaited.
    """

    def __init__(self, answers: AsyncGenerator[Answer, None]) -> None:
        self._rest = answers
        # Dynamo takes this attribute once and calls it for each answer: no Python of ours runs for a token.
        calls: Iterator[Callable[[], Any]] = chain((partial(_begin, answers),), repeat(answers.__anext__))
        vars(self)["__anext__"] = map(call, calls).__next__

    async def _first(self) -> Answer:
        assert self._rest is not None
        return await anext(self._rest)


async def _begin(answers: AsyncGenerator[Answer, None]) -> Answer:
    return await anext(answers)
