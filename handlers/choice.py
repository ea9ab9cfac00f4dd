"""Which way a request is answered: as it asks itself, as another worker has decided, or as this worker does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping

from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.handlers.live import Live
from trtllm_disagg.handlers.pins import NEXT
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

#: `nvext.annotations: ["disagg:decode_first"]`.
PREFIX = "disagg:"


class Choice:
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
        """Raises InvalidRequestError for a name that is none."""
        self._check(request)
        if request.errand is not None and request.errand.strategy is not None:
            name, reason = self._known(request.errand.strategy), "asked_by_worker"
        elif (asked := self._asked(request)) is not None:
            name, reason = asked, "annotation"
        else:
            name, reason = self._strategy.value, "default"
            request.journey.chose(name, reason)
            return self._deployed[name](request, context)
        request.journey.chose(name, reason)
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
