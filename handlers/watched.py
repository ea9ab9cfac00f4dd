"""Calls of the other stage, with a deadline for their first answer, and a breaker that hears how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any

from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    NoInstanceError,
    PeerUnavailableError,
    QueueUnusableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.breaker import Breaker
from trtllm_disagg.handlers.remote import StageClient, StageInstance
from trtllm_disagg.types import GenerateRequest, RequestContext

#: What speaks against an instance. An overloaded one is well, and a bad request is none of its faults.
_FAULTS = (PeerUnavailableError, StageTimeoutError, EngineError)


class WatchedStage:
    def __init__(self, stage: StageClient, breaker: Breaker, seconds: Mapping[str, float]) -> None:
        """`seconds`: by the errand's stage, until its first answer."""
        self._stage = stage
        self._breaker = breaker
        self._seconds = seconds
        self._unanswered = Unanswered()

    def instance_ids(self) -> Collection[int]:
        return self._stage.instance_ids()

    def check(self, request: GenerateRequest) -> None:
        self._stage.check(request)

    def num_well(self) -> int:
        """Instances whose breaker is closed."""
        return len(set(self.instance_ids()) - self._breaker.open())

    def depth(self) -> int:
        """Calls of this worker without an answer yet, beyond one for each instance: those wait."""
        return max(0, self._unanswered.count - len(self.instance_ids()))

    async def pick(self, request: GenerateRequest) -> WatchedInstance:
        """One whose breaker is closed; if there is none, any: better a doubtful instance than none."""
        cautious = request
        for instance_id in self._breaker.open():
            cautious = cautious.avoiding(instance_id)
        try:
            picked = await self._stage.pick(cautious)
        except NoInstanceError:
            if cautious is request:
                raise
            picked = await self._stage.pick(request)
        return WatchedInstance(picked, self._breaker, self._seconds, self._unanswered)


class Unanswered:
    """How many calls wait for their first answer."""

    def __init__(self) -> None:
        self.count = 0


class WatchedInstance:
    def __init__(
        self,
        instance: StageInstance,
        breaker: Breaker,
        seconds: Mapping[str, float],
        unanswered: Unanswered,
    ) -> None:
        self._instance = instance
        self._breaker = breaker
        self._seconds = seconds
        self._unanswered = unanswered

    @property
    def instance_id(self) -> int:
        return self._instance.instance_id

    async def describe(self) -> dict[str, Any]:
        return await self._instance.describe()

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(self._instance.call(request, context)) as answers:
                first = await self._first(answers, str(request.get("errand", {}).get("stage")))
                if first is not None:
                    yield first
                    async for answer in answers:
                        yield answer
                self._breaker.succeeded(self.instance_id)
        except DisaggError as error:
            if isinstance(error, _FAULTS) and not isinstance(error, QueueUnusableError):
                self._breaker.failed(self.instance_id)
            raise

    async def _first(
        self, answers: AsyncGenerator[dict[str, Any], None], stage: str
    ) -> dict[str, Any] | None:
        seconds = self._seconds.get(stage)
        self._unanswered.count += 1
        try:
            async with asyncio.timeout(seconds):
                return await anext(answers, None)
        except TimeoutError:
            late = StageTimeoutError(f"no answer to {stage} within {seconds:g} s")
            late.peer = self.instance_id
            raise late from None
        finally:
            self._unanswered.count -= 1
