"""Answers a request, from its arrival to its end. All that happens to it is called from here."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from trtllm_disagg.errors import DisaggError, PeerUnavailableError
from trtllm_disagg.handlers.attempts import Plan
from trtllm_disagg.handlers.choices import FrontendContext, answer_each
from trtllm_disagg.handlers.delivered import Delivered, Replays, resumed
from trtllm_disagg.handlers.multi_turn import NextTurns
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.run import Run, RunCounts
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.migration_link import MigrationLink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnsweringWorker:
    """What a worker needs to answer requests; calling it runs `answer`."""

    plan: Plan
    replays: Replays
    #: When a frontend resends a request after a worker's death, continue behind the tokens that the client has.
    resumes: bool
    facts: PairFacts
    counts: RunCounts
    #: Receives other workers' notices; None: this worker needs none.
    notices: Recalls | None = None
    #: Raises InvalidRequestError for impossible choices. None: one answer serves all choices.
    require_choices: Callable[[GenerateRequest], None] | None = None
    next_turns: NextTurns = field(default_factory=NextTurns)

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        return answer(self, request, context)

    def running(self, request: GenerateRequest, context: RequestContext) -> Run:
        tokens: list[int] = []
        #: Length of the prompt and seed, for the worker that resumes this request if this one dies.
        link: MigrationLink | None = None
        # The frontend does not say which of several choices the client's tokens belong to.
        is_only_choice = request.choice is None and request.num_choices == 1
        if self.resumes and request.phase_request is None and is_only_choice:
            request, tokens, link = resumed(request, self.replays)
        delivered = Delivered(tokens, self.replays, self.facts)
        return Run(request, context, self.plan, delivered, self.counts, self.next_turns, link)


async def answer(
    worker: AnsweringWorker, request: GenerateRequest, context: RequestContext
) -> AsyncGenerator[TokenChunk, None]:
    """Run one attempt after the other until the client has its answer. If one fails, even mid-stream, the next
    generates only the missing tokens. Raises the last attempt's DisaggError when none is left.
    """
    # If decode dies after 100 tokens in prefill_first, `RemoteDecode` raises, and the next attempt prefills prompt and
    # tokens, or replays the tokens (`delivered.py`). In decode_first this process has died: the frontend sends request
    # and tokens to another decode worker, where `running` resumes it.
    if request.phase_request is not None and request.phase_request.is_notice:
        # Notices bypass admission, logging, counters and the drain.
        if worker.notices is None:
            raise PeerUnavailableError(f"this worker accepts no notice {request.phase_request.phase}")
        worker.notices.receive(request.phase_request)
        return
    if request.phase_request is None and worker.require_choices is not None and request.num_choices > 1:
        worker.require_choices(request)
        each = answer_each(partial(answer, worker), request, cast(FrontendContext, context))
        async with aclosing(each) as chunks:
            async for chunk in chunks:
                yield chunk
        return
    with worker.running(request, context) as run:
        while not run.has_nothing_left:  # except the finish reason
            # First the same order again, then this worker alone, then a peer (`services._routes`); then it raises.
            attempt = await run.next_attempt()
            try:
                async with aclosing(attempt.chunks(run.begin(attempt), context)) as chunks:
                    async for chunk in chunks:
                        if (new := run.delivered.new(chunk)) is not None:  # without what the client has
                            yield run.saw(new)
                            run.goes_on()
                return
            except DisaggError as error:
                if run.is_over:
                    log.info("request %s: failed after its end: %s", context.id(), error)
                    return
                run.failed(attempt, error)
        yield run.saw(run.end_chunk())
