"""The fallback ladder: when one way to answer fails, the next one goes on where it stopped."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.resume import (
    Replays,
    has_ended,
    only_if_it_must,
    repeatable,
    rest_of,
    the_end,
)
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)


class Rung(NamedTuple):
    """One way to answer a whole request. `to` names it in logs, metrics and answers."""

    to: str
    generate: Generate
    #: What runs then, if it is not what was chosen.
    strategy: str | None = None
    #: It has no use for this worker's own engine, and is for requests whose engine has died.
    without_engine: bool = False


def ladder(rungs: Sequence[Rung], replays: Replays = only_if_it_must) -> Generate:
    """The first rung, else the next one, bounded by their number.

    The caller's faults are final, and so is what this worker's own engine fails at, unless it is dead. Each rung makes
    a handoff of its own. An instance that has failed is not asked again for this request.
    """

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        request = repeatable(request) if replays(request) else request
        delivered: list[int] = []
        is_over = is_alone = has_no_engine = False
        error: DisaggError | None = None
        for place, rung in enumerate(rungs):
            if rung.without_engine is not has_no_engine:
                continue
            if is_alone and rung.to == rungs[place - 1].to:
                continue  # it would find no other one either
            if error is not None:
                log.warning(
                    "request %s: %s after %d tokens: %s", context.id(), rung.to, len(delivered), error
                )
                request.journey.fell_back(rung.to, str(error))
                request.journey.strategy = rung.strategy or request.journey.strategy
                if has_ended(request, delivered):
                    yield the_end(request, delivered)
                    return
            rest = rest_of(request, delivered, replays)
            try:
                async with aclosing(rung.generate(rest.request, context)) as chunks:
                    async for chunk in chunks:
                        new = rest.new(chunk)
                        if new is not None:
                            delivered += new.token_ids
                            is_over = new.finish_reason is not None
                            yield new
                return
            except DisaggError as failed:
                if is_over:
                    log.info("request %s: failed after its end: %s", context.id(), failed)
                    return
                if context.is_stopped() or not _may_go_on(failed):
                    raise
                if error is None or not isinstance(failed, NoInstanceError):
                    error = failed
                is_alone = isinstance(failed, NoInstanceError)
                has_no_engine = has_no_engine or isinstance(failed, WorkerLeavingError)
                if failed.peer is not None:
                    request = request.avoiding(failed.peer)
        if error is not None:
            raise error

    return generate


def _may_go_on(error: DisaggError) -> bool:
    if isinstance(error, EngineError):  # of another worker's engine
        return error.peer is not None
    return isinstance(error, (PeerUnavailableError, StageTimeoutError, OverloadedError, WorkerLeavingError))
