"""Chooses the way to answer a request: the one that it asks for, or another worker's choice, or the deployment's."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Collection, Mapping

from trtllm_disagg.config.thresholds import Live
from trtllm_disagg.errors import InvalidRequestError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.remote import StageClient, answers_of, blaming, dispatch_span, select_instance
from trtllm_disagg.types import Generate, GenerateRequest, PhaseRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_chunk, encode_request

# Dynamo's frontend takes our first stage for aggregated workers. It requires that `decode_worker_id` (and the header
# x-dynamo-worker-instance-id) is an instance of that stage, answers 400 otherwise, and forwards `prefill_worker_id`
# (x-dynamo-prefill-instance-id) unchecked. Both may name an instance of either role; measured in both orders
# (docs/log/dynamo.md).


#: `nvext.annotations: ["disagg:next=1a2b,3c4d"]`: ids hexadecimal, as in logs, or decimal, as in Dynamo's requests.
NEXT = "disagg:next="

_ID = re.compile(r"[0-9a-f]{1,16}|[0-9]{1,20}")


def pins_of(request: GenerateRequest, own_id: int, known: Collection[int]) -> list[int]:
    """The ids of the annotation, else Dynamo's pins but for this worker itself. A number that could be hexadecimal or
    decimal means the id that is in `known`. Raises InvalidRequestError for what is no id.
    """
    words = [w for a in request.annotations if a.startswith(NEXT) for w in a.removeprefix(NEXT).split(",")]
    if words:
        return [_read(word.strip().lower(), known) for word in words]
    return [pin for pin in request.pins.values() if pin not in (None, own_id)]


def names_prefill(request: GenerateRequest) -> bool:
    """On a decode worker: whether the request asks for certain prefill workers."""
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
        """`ways`: by name, for requests that ask for a way by name. `deployed`: by deployment strategy, for all other
        requests; these have the decider in them. `check` validates the request's pins.
        """
        self._ways = ways
        self._deployed = deployed
        self._strategy = strategy
        self._check = check

    def __call__(self, request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        """Raises InvalidRequestError when a client, PeerUnavailableError when a worker asks for an unknown way."""
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
        """The way that the request's annotations name. Raises InvalidRequestError when they name two."""
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


def relayed(stage: StageClient, strategy: str, full: int | None = None) -> Generate:
    """A way to answer that sends the whole request to a worker of the other role, the first stage of this strategy.
    `full`: this worker, where it does so because its batch is full.
    """
    whole = PhaseRequest("whole", strategy, full=full)

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if request.phase_request is not None:
            # Two workers with lost engines would relay it back and forth.
            raise NoInstanceError("this request was relayed already")
        with request.span.child("other_stage") as span:
            request = request.within(span)
            instance = await select_instance(stage, request)
            request.trace.facts["first_stage"] = f"{instance.instance_id:x}"
            dispatch = dispatch_span(instance, request)
            # Pins are for this worker's call, not for the call that the other worker makes.
            annotations = [each for each in request.annotations if not each.startswith(NEXT)]
            raw = encode_request(request.within(dispatch), whole, annotations=annotations)
            with blaming(instance):
                async with answers_of(instance, raw, context) as answers:
                    with dispatch:
                        async for raw in answers:
                            yield decode_chunk(raw)

    return generate
