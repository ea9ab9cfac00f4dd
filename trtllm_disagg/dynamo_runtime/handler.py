"""The handler that Dynamo calls for requests, health probes, control commands and descriptions."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import call
from pathlib import Path
from typing import Any, Protocol

from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg import errors
from trtllm_disagg.admin.commands import CONTROL, is_control
from trtllm_disagg.common.reports import RateLimitedLog
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.config.yaml_file import read_json
from trtllm_disagg.dynamo_runtime.error_mapping import to_dynamo
from trtllm_disagg.dynamo_runtime.pushed_answers import Answer, pushed
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

log = logging.getLogger(__name__)

#: The key of a request for the worker's description.
DESCRIBE = "trtllm_disagg.describe"
#: The key of a health probe: a request that any worker runs alone on its engine, since an engine that reports it is
#: healthy may be stuck.
PROBE = "trtllm_disagg.probe"
#: The default probe: one prompt token, one generated token, priority above waiting requests.
SMALLEST_REQUEST = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}, "priority": 1.0}

#: Executes a control command, perhaps malformed, and returns the answer. Raises a DisaggError.
HandleCommand = Callable[[Any], Awaitable[dict[str, Any]]]
#: Runs a health probe's request. Raises a DisaggError if the engine cannot run it.
Probe = Callable[[GenerateRequest], Awaitable[None]]


class FirstTokens(Protocol):
    """Dynamo's FirstTokenSource: tells every router replica that a request's prefill has ended."""

    def bind(self, context: Any, dp_rank: int | None) -> None: ...


def health_check_payload(given: str | None) -> dict[str, Any]:
    """The payload from the flag's value. Raises ConfigError if it is no valid request."""
    payload = SMALLEST_REQUEST if given is None else _read(given)
    try:
        decode_request(payload)
    except InvalidRequestError as error:
        allowed = f"a request such as {json.dumps(SMALLEST_REQUEST)} ({error})"
        raise ConfigError.bad_value(flag_of("health_check_payload"), given, allowed) from None
    return payload | {PROBE: True}


def _read(given: str) -> dict[str, Any]:
    flag = flag_of("health_check_payload")
    try:
        text = Path(os.path.expanduser(given[1:])).read_text() if given.startswith("@") else given
        payload = read_json(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.bad_value(flag, given, f"JSON, or @FILE with it ({error})") from None
    if not isinstance(payload, dict):
        raise ConfigError.bad_value(flag, given, "a JSON object")
    return payload


async def answers_by_itself(request: GenerateRequest) -> None:
    """A probe that always succeeds, for a handler without an engine."""


async def refuse_control(raw: Any) -> dict[str, Any]:
    raise errors.InvalidRequestError("this worker takes no control commands")


@dataclass(eq=False)
class Handler:
    """Dynamo calls `function` with each request in one role term. It passes all arguments but the first by name, and
    reads the names: requests from the network get a response sender, cheaper than polling for each chunk.
    """

    generate: Generate
    describe: Callable[[], dict[str, Any]]
    handle_command: HandleCommand = refuse_control
    longest_prompt: float = math.inf
    probe: Probe = answers_by_itself
    takes_images: bool = False
    #: None for this type of worker.
    first_tokens: FirstTokens | None = None

    warn_overloaded: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(log))

    @property
    def function(self) -> Callable[..., Any]:
        return self._answering

    def release(self) -> None:
        """Release the role term: Dynamo keeps `function` for the life of the process, and its source of first tokens
        has a socket until the last reference is gone.
        """
        self.generate = self.describe = self.handle_command = self.probe = _refuse
        self.first_tokens = None

    def _answering(self, request: dict[str, Any], context: Any, response_sender: Any = None) -> _BegunOnLoop:
        answers = self._answers(request, context)
        if response_sender is not None:
            answers = pushed(answers, response_sender, context.is_stopped)
        return _BegunOnLoop(answers)

    async def _answers(self, request: Any, context: Any) -> AsyncGenerator[Answer, None]:
        with _errors_for_dynamo(context, self.warn_overloaded):
            if not isinstance(request, dict):
                raise InvalidRequestError(f"request: expected an object, got {type(request).__name__}")
            if PROBE in request:
                await self.probe(decode_request(request, self.longest_prompt))
            if DESCRIBE in request or PROBE in request:
                yield self.describe()
                return
            if is_control(request):
                yield await self.handle_command(request[CONTROL])
                return
            headers = context.trace_headers()
            decoded = decode_request(request, self.longest_prompt, headers, takes_images=self.takes_images)
            first_tokens = self.first_tokens if decoded.phase_request is None else None
            if first_tokens is not None:
                first_tokens.bind(context, decoded.dp_rank)
            async with aclosing(self.generate(decoded, context)) as chunks:
                async for chunk in chunks:
                    yield encode_chunk(chunk)
                    # After the token: notifying the routers takes 0.1 ms. For an ended request the frontend notifies
                    # them.
                    if first_tokens is not None and chunk.token_ids and chunk.finish_reason is None:
                        first_tokens = None
                        context.notify_first_token()


def _refuse(*_: object) -> Any:
    raise errors.WorkerLeavingError("this worker has left")


#: Of two workers that share a request, the first to notice releases the KV, and the other loses it.
_OF_A_CLIENT_THAT_LEFT = (errors.RequestCancelledError, errors.KvTransferError)


@contextmanager
def _errors_for_dynamo(context: Any, warn_overloaded: RateLimitedLog) -> Iterator[None]:
    """Log a request's error and raise Dynamo's for it. If the client left, the request ends without one."""
    try:
        yield
    except asyncio.CancelledError:
        if context.is_stopped():
            raise
        # Dynamo would turn CancelledError into 499, as if the client had disconnected.
        raise to_dynamo(errors.WorkerLeavingError("this worker is leaving")) from None
    except errors.DisaggError as error:
        if isinstance(error, _OF_A_CLIENT_THAT_LEFT) and context.is_stopped():
            log.info("request %s: %s", context.id(), error)
            return
        # Floods of overload would fill the log.
        warn = warn_overloaded if isinstance(error, errors.OverloadedError) else log.warning
        warn("request %s: %s: %s", context.id(), type(error).__name__, error)
        raise to_dynamo(error) from None
    except Exception as error:
        # A bug fails this request, not the worker.
        log.exception("request %s failed unexpectedly", context.id())
        raise dynamo_errors.Unknown(f"{type(error).__name__}: {error}") from error


class _BegunOnLoop:
    """Begins an answer on the event loop. Dynamo polls answers and drops generators in its own threads; Python closes a
    generator on the event loop where it began, else in the dropping thread, which cannot await.
    """

    def __init__(self, answers: AsyncGenerator[Answer, None]) -> None:
        self._answers = answers
        # Dynamo reads this attribute once and calls it for each answer, bypassing this class.
        calls: Iterator[Callable[[], Any]] = chain((partial(_First, answers),), repeat(answers.__anext__))
        vars(self)["__anext__"] = map(call, calls).__next__

    def __aiter__(self) -> _BegunOnLoop:
        return self

    async def __anext__(self) -> Answer:
        return await anext(self._answers)

    async def aclose(self) -> None:
        await self._answers.aclose()


class _First:
    """The first answer, as a Future to which Dynamo adds a callback on the event loop. Dynamo prints each error's
    traceback, so expected errors, which the log has, carry none.
    """

    _asyncio_future_blocking = False

    def __init__(self, answers: AsyncGenerator[Answer, None]) -> None:
        self._answers = answers

    def add_done_callback(self, callback: Callable[[asyncio.Future[Answer]], object]) -> None:
        def done(first: asyncio.Future[Answer]) -> None:
            error = None if first.cancelled() else first.exception()
            if isinstance(error, (dynamo_errors.DynamoException, dynamo_errors.HttpError)):
                first = first.get_loop().create_future()
                first.set_exception(error.with_traceback(None))
            callback(first)

        asyncio.ensure_future(self._begin()).add_done_callback(done)

    async def _begin(self) -> Answer:
        return await anext(self._answers)
