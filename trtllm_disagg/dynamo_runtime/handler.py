"""A Generate, as Dynamo calls it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from dynamo.llm import exceptions as dynamo_errors

from trtllm_disagg import errors
from trtllm_disagg.commands import CONTROL, is_control
from trtllm_disagg.dynamo_runtime import pushed_answers
from trtllm_disagg.dynamo_runtime.error_mapping import to_dynamo
from trtllm_disagg.dynamo_runtime.health_check import PROBE
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request, encode_chunk

log = logging.getLogger(__name__)

#: A request with this key asks for the worker's description.
DESCRIBE = "trtllm_disagg.describe"


#: What a worker does with a control command, however little it looks like one. Raises a DisaggError.
HandleCommand = Callable[[Any], Awaitable[dict[str, Any]]]


#: Runs the request of a health probe. Raises a DisaggError when the engine does no work.
Probe = Callable[[GenerateRequest], Awaitable[None]]


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
) -> Callable[..., Any]:
    """What Dynamo calls with each request. It finds the parameters behind the first by their names.

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
            async with aclosing(generate(asked, context)) as chunks:
                async for chunk in chunks:
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

    def handle_pushing(
        request: dict[str, Any], context: Any, response_sender: Any = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        answers = handle(request, context)
        return answers if response_sender is None else pushed_answers.pushed(answers, response_sender)

    return handle_pushing if pushes else handle
