"""A worker with fixed attempts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.handlers.admission import Admission, Queued
from trtllm_disagg.handlers.answer import AnsweringWorker
from trtllm_disagg.handlers.attempts import FIRST, Attempt
from trtllm_disagg.handlers.delivered import Replays, replay_if_needed
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.run import RunCounts
from trtllm_disagg.handlers.trace import RequestLog, RequestSink, Write, write_line
from trtllm_disagg.tracing.tracer import Tracer
from trtllm_disagg.types import Generate, GenerateRequest


@dataclass(frozen=True, slots=True)
class Fixed:
    """A Plan with the same attempts for every request."""

    steps: Sequence[Attempt]

    async def attempts(self, request: GenerateRequest) -> Sequence[Attempt]:
        return self.steps


@dataclass(frozen=True, slots=True)
class Unlimited(PairFacts):
    """Facts of engines that take every request."""

    role: Role = Role.AGG
    own: EngineFacts = field(default_factory=EngineFacts)
    limit: int | None = None

    def max_new_tokens(self, request: GenerateRequest) -> int | None:
        return self.limit or request.stop.max_tokens

    def fits(self, request: GenerateRequest) -> bool:
        return True


def counts_of(
    log: RequestLog | None = None, drain: WorkerDrain | None = None, admission: Admission | None = None
) -> RunCounts:
    unlimited = Admission(Live(Thresholds.of(WorkerConfig(model="m"))), Queued())
    return RunCounts(admission or unlimited, log or RequestLog(), drain or WorkerDrain())


def trying(
    steps: Sequence[Attempt] | Generate,
    replays: Replays = replay_if_needed,
    facts: PairFacts | None = None,
    counts: RunCounts | None = None,
    *,
    resumes: bool = True,
) -> AnsweringWorker:
    """`steps`: fallback steps, or a single answer."""
    if not isinstance(steps, Sequence):
        steps = [Attempt(FIRST, steps)]
    return AnsweringWorker(Fixed(steps), replays, resumes, facts or Unlimited(), counts or counts_of())


def logged(
    generate: Generate,
    part: str = "agg",
    sinks: list[RequestSink] | None = None,
    tracer: Tracer | None = None,
    write: Write = write_line,
) -> AnsweringWorker:
    """`generate` with a log line and a span per request."""
    log = RequestLog(lambda: part, [] if sinks is None else sinks, tracer or Tracer(), write)
    if isinstance(generate, AnsweringWorker):
        return replace(generate, counts=replace(generate.counts, log=log))
    return trying(generate, counts=counts_of(log), resumes=False)


def tracked(drain: WorkerDrain, generate: Generate) -> AnsweringWorker:
    """`generate`, with `drain` counting and ending its requests."""
    return trying(generate, counts=counts_of(drain=drain), resumes=False)


def admitted(admission: Admission, generate: Generate) -> AnsweringWorker:
    return trying(generate, counts=counts_of(admission=admission), resumes=False)
