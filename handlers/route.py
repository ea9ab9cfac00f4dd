"""Which way a request is answered: as it asks itself, as another worker has decided, or as this worker does."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing

from trtllm_disagg.config.thresholds import Live
from trtllm_disagg.errors import InvalidRequestError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.remote import StageClient, dispatched, selected
from trtllm_disagg.types import Generate, GenerateRequest, PhaseRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_chunk, encode_request

# Dynamo's frontend takes our first stage for whole workers. So it holds `decode_worker_id` (and the header
# x-dynamo-worker-instance-id) against that stage, answers 400 for any other instance, and passes `prefill_worker_id`
# (x-dynamo-prefill-instance-id) on without a look. Both may come with any instance, whatever its role; measured in
# both orders (docs/log.md).


#: `nvext.annotations: ["disagg:next=1a2b,3c4d"]`: ids as logs print them, or decimal, as Dynamo does.
NEXT = "disagg:next="

_ID = re.compile(r"[0-9a-f]{1,16}|[0-9]{1,20}")


def pins_of(request: GenerateRequest, own_id: int, known: Collection[int]) -> list[int]:
    """The annotation's ids, else Dynamo's; this worker itself is no wish. `known` tells how a number was meant.
    Raises InvalidRequestError for what is no id.
    """
    words = [w for a in request.annotations if a.startswith(NEXT) for w in a.removeprefix(NEXT).split(",")]
    if words:
        return [_read(word.strip().lower(), known) for word in words]
    return [pin for pin in request.pins.values() if pin not in (None, own_id)]


def names_prefill(request: GenerateRequest) -> bool:
    """On a decode worker: whether it asks for certain prefill workers."""
    return request.pins.get("prefill") is not None or any(a.startswith(NEXT) for a in request.annotations)


def _read(word: str, known: Collection[int]) -> int:
    if not _ID.fullmatch(word):
        raise InvalidRequestError(
            f"nvext.annotations: {NEXT + word!r} is not allowed; expected ids of instances, hexadecimal or decimal, "
            "with commas"
        )
    readings = [int(word, base) for base in (16, 10) if base == 16 or word.isdecimal()]
    return next((each for each in readings if each in known), readings[0])


#: `nvext.annotations: ["disagg:decode_first"]`.
PREFIX = "disagg:"


class StrategyRouter:
    def __init__(
        self,
        ways: Mapping[str, Generate],
        deployed: Mapping[str, Generate],
        strategy: Live[str],
        check: Callable[[GenerateRequest], None],
    ) -> None:
        """`ways`, by the names that a request may ask for, do exactly that. `deployed` are those that a deployment
        may have as its `strategy`; a decider is in them. `check` is for what else a request wishes for.
        """
        self._ways = ways
        self._deployed = deployed
        self._strategy = strategy
        self._check = check

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        """Raises InvalidRequestError for a name that is none, PeerUnavailableError when a worker has chosen it."""
        self._check(request)
        if request.phase_request is not None and request.phase_request.strategy is not None:
            name, reason = request.phase_request.strategy, "asked_by_worker"
            if name not in self._ways:  # of another version
                raise PeerUnavailableError(f"this worker does not know the strategy {name!r}")
        elif (asked := self._asked(request)) is not None:
            name, reason = asked, "annotation"
        else:
            name, reason = self._strategy.value, "default"
            request.trace.chose(name, reason)
            return self._deployed[name](request, context)
        request.trace.chose(name, reason)
        return self._ways[name](request, context)

    def _asked(self, request: GenerateRequest) -> str | None:
        """Raises InvalidRequestError when it asks for two."""
        words = [a for a in request.annotations if a.startswith(PREFIX) and not a.startswith(NEXT)]
        names = [self._known(word.removeprefix(PREFIX)) for word in dict.fromkeys(words)]
        if len(names) > 1:
            both = " and ".join(PREFIX + name for name in names)
            raise InvalidRequestError(
                f"nvext.annotations: {both} contradict each other; expected one of them"
            )
        return names[0] if names else None

    def _known(self, name: str) -> str:
        if name not in self._ways:
            allowed = ", ".join([*(PREFIX + way for way in sorted(self._ways)), NEXT + "INSTANCE,..."])
            raise InvalidRequestError(
                f"nvext.annotations: {PREFIX + name!r} is not allowed; expected one of {allowed}"
            )
        return name


def relayed(stage: StageClient, strategy: str) -> Generate:
    """A worker of the other role answers the whole request, because it is to run in that worker's order."""
    wanted = PhaseRequest("whole", strategy)

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if request.phase_request is not None:
            # Two workers without engines would send it to and fro.
            raise NoInstanceError("this request was relayed already")
        has_ended = False
        with request.span.child("other_stage") as span:
            request = request.within(span)
            instance = await selected(stage, request)
            request.trace.facts["first_stage"] = f"{instance.instance_id:x}"
            dispatch = dispatched(instance, request)
            raw = encode_request(request.within(dispatch), wanted)
            # A wish for an instance has been heard here; the other worker calls another one.
            raw["annotations"] = [each for each in request.annotations if not each.startswith(NEXT)]
            async with aclosing(instance.call(raw, context)) as answers:
                with dispatch:
                    async for raw in answers:
                        chunk = decode_chunk(raw)
                        has_ended = chunk.finish_reason is not None
                        yield chunk
        if not has_ended and not context.is_stopped():
            error = PeerUnavailableError("the other worker's answer stops without an end")
            error.peer = instance.instance_id
            raise error

    return generate
