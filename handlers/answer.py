"""A worker's answer to a request, from its arrival to its end. Everything that happens to it is called from here."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from trtllm_disagg.errors import DisaggError, PeerUnavailableError
from trtllm_disagg.handlers.attempts import Plan
from trtllm_disagg.handlers.delivered import Delivered, Replays, resumed
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.run import Run, RunCounts
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnsweringWorker:
    """What one worker answers requests with. Call it with a request: `answer`."""

    plan: Plan
    replays: Replays
    #: Dynamo's migration link is ours: a migrated request goes on where its client is.
    resumes: bool
    limits: PairFacts
    counts: RunCounts
    #: Gets notices of other workers; None: this worker has no use for any.
    notices: Recalls | None = None

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return answer(self, request, context)

    def running(self, request: GenerateRequest, context: RequestContext) -> Run:
        tokens: list[int] = []
        link: dict[str, str] | None = None
        # With several choices it is unknown which choice's tokens the client has.
        if self.resumes and request.phase_request is None and request.num_choices == 1:
            request, tokens, own_link = resumed(request, self.replays)
            link = own_link.encode()
        delivered = Delivered(tokens, self.replays, self.limits)
        return Run(request, context, self.plan, delivered, self.counts, link)


async def answer(
    worker: AnsweringWorker, request: GenerateRequest, context: RequestContext
) -> AsyncGenerator[TokenChunk, None]:
    """One attempt after the other, until the client has its answer. When one fails, also behind a hundred tokens, the
    next one makes the tokens that the client lacks. Raises the DisaggError of the last one when none is left.
    """
    if request.phase_request is not None and request.phase_request.is_notice:
        # Not refused by admission, and no request to a log, a counter or a drain.
        if worker.notices is None:
            raise PeerUnavailableError(f"this worker takes no notice {request.phase_request.kind}")
        worker.notices.receive(request.phase_request)
        return
    with worker.running(request, context) as run:
        while not run.has_nothing_left:
            attempt = await run.next_attempt()
            try:
                async with aclosing(run.begin(attempt)) as chunks:
                    async for chunk in chunks:
                        if (new := run.delivered.new(chunk)) is not None:
                            yield run.saw(new)
                            run.goes_on()
                return
            except DisaggError as error:
                if run.is_over:
                    log.info("request %s: failed after its end: %s", context.id(), error)
                    return
                run.failed(attempt, error)
        yield run.saw(run.end_chunk())
