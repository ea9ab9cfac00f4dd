"""A prefill through the queue, or without it where the queue cannot take it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trtllm_disagg.errors import NoInstanceError, QueueUnusableError
from trtllm_disagg.types import GenerateRequest, Handoff, PrefillPhase, RequestContext

log = logging.getLogger(__name__)


def queued(
    through: PrefillPhase,
    direct: PrefillPhase,
    passes_by: Callable[[GenerateRequest], bool] = lambda request: False,
) -> PrefillPhase:
    """`direct` runs a request that is too large for the queue, that the queue has lost with all that it had, or that
    `passes_by`, because whoever has room is not who it asks for.
    """

    async def prefill(request: GenerateRequest, context: RequestContext) -> Handoff:
        if passes_by(request):
            return await direct(request, context)
        try:
            return await through(request, context)
        except QueueUnusableError as error:
            if context.is_stopped():
                raise
            unusable = error
        log.warning("request %s: direct: %s", context.id(), unusable)
        request.journey.fell_back("direct", str(unusable))
        # Whoever was at it does not answer any more.
        request.journey.facts.pop("prefill_instance", None)
        try:
            return await direct(request, context)
        except NoInstanceError:
            raise unusable from None  # says more than that nobody else is there

    return prefill
