"""Calls of the other stage, with deadlines for their answers, and a breaker that hears how they end."""

from __future__ import annotations

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
from trtllm_disagg.handlers.patience import Alarm, Patience
from trtllm_disagg.handlers.remote import StageClient, StageInstance
from trtllm_disagg.types import GenerateRequest, RequestContext

#: What speaks against an instance. An overloaded one is well, and a bad request is none of its faults.
_FAULTS = (PeerUnavailableError, StageTimeoutError, EngineError)


class WatchedStage:
    def __init__(self, stage: StageClient, breaker: Breaker, patience: Mapping[str, Patience]) -> None:
        """`patience`: by the errand's stage."""
        self._stage = stage
        self._breaker = breaker
        self._patience = patience
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
        return WatchedInstance(picked, self._breaker, self._patience, self._unanswered)


class Unanswered:
    """How many calls wait for their first answer."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class WatchedInstance:
    def __init__(
        self,
        instance: StageInstance,
        breaker: Breaker,
        patience: Mapping[str, Patience],
        unanswered: Unanswered,
    ) -> None:
        self._instance = instance
        self._breaker = breaker
        self._patience = patience
        self._unanswered = unanswered

    @property
    def instance_id(self) -> int:
        return self._instance.instance_id

    async def describe(self) -> dict[str, Any]:
        return await self._instance.describe()

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        stage = str(request["errand"]["stage"])
        patience = self._patience[stage]
        further = f"further answer to {stage}"
        try:
            with Alarm(self.instance_id) as alarm:
                async with aclosing(self._instance.call(request, context)) as answers:
                    alarm.expect(f"answer to {stage}", patience.first)
                    with self._unanswered:
                        first = await anext(answers, None)
                    if first is not None:
                        alarm.rest()
                        yield first
                        alarm.expect(further, patience.next)
                        async for answer in answers:
                            alarm.rest()
                            yield answer
                            alarm.expect(further, patience.next)
                self._breaker.succeeded(self.instance_id)
        except DisaggError as error:
            if isinstance(error, _FAULTS) and not isinstance(error, QueueUnusableError):
                self._breaker.failed(self.instance_id)
            raise
