"""A Generate, as Dynamo calls it: one handler for requests, health probes, control commands and descriptions."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import chain, repeat
from operator import call
from pathlib import Path
from typing import Any, Protocol

from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg import errors
from trtllm_disagg.commands import CONTROL, is_control
from trtllm_disagg.config.worker_config import flag_of
from trtllm_disagg.dynamo_runtime.error_mapping import to_dynamo
from trtllm_disagg.dynamo_runtime.pushed_answers import Answer, pushed
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.handlers.streams import PerRequestStream
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

log = logging.getLogger(__name__)

#: A request with this key asks for the worker's description.
DESCRIBE = "trtllm_disagg.describe"
#: Marks a health probe: a request that this worker runs whole on its own engine, whatever its role. It costs a token at
#: least: an engine that says that it lives may be stuck.
PROBE = "trtllm_disagg.probe"
#: The probe without a setting: one token of a prompt of one, before all that waits.
SMALLEST_REQUEST = {"token_ids": [1], "stop_conditions": {"max_tokens": 1}, "priority": 1.0}

#: What a worker does with a control command, however little it looks like one. Raises a DisaggError.
HandleCommand = Callable[[Any], Awaitable[dict[str, Any]]]
#: Runs the request of a health probe. Raises a DisaggError when the engine does no work.
Probe = Callable[[GenerateRequest], Awaitable[None]]


class FirstTokens(Protocol):
    """Dynamo's FirstTokenSource: tells every router's replica that a request has left its prefill behind."""

    def bind(self, context: Any, dp_rank: int | None) -> None: ...


def health_check_payload(given: str | None) -> dict[str, Any]:
    """`given`: the setting of that name. Raises ConfigError for what is no request."""
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

    async def handle(request: dict[str, Any], context: Any) -> AsyncGenerator[Answer, None]:
        if DESCRIBE in request:
            yield describe()
            return
        with _errors_as_dynamo_has_them(context):
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

    def handle_asked(request: dict[str, Any], context: Any) -> AsyncGenerator[Answer, None]:
        return _BegunOnLoop(handle(request, context))

    def handle_pushing(
        request: dict[str, Any], context: Any, response_sender: Any = None
    ) -> AsyncGenerator[Answer, None]:
        answers = handle(request, context)
        return _BegunOnLoop(answers if response_sender is None else pushed(answers, response_sender))

    return handle_pushing if pushes else handle_asked


@contextmanager
def _errors_as_dynamo_has_them(context: Any) -> Iterator[None]:
    """Around one request: logs what it fails with and raises Dynamo's error for it. A request that its client has left
    just ends.
    """
    try:
        yield
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
