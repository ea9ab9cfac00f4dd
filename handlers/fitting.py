"""Only instances of the other stage that this worker fits together with are called."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.handlers.remote import StageClient, StageInstance
from trtllm_disagg.types import GenerateRequest

#: It is a round trip; who takes longer is not well, and the call's own deadline is for that.
_DESCRIBE_SECONDS = 1.0

log = logging.getLogger(__name__)


class FittingStage:
    """A StageClient. Instances come at any time, and each is asked who it is once, by the first request that could
    go there.
    """

    def __init__(self, stage: StageClient, require_fit: Callable[[dict[str, Any]], None]) -> None:
        """`require_fit` raises ConfigError for an instance that says of itself what does not fit."""
        self._stage = stage
        self._require_fit = require_fit
        self._fitting: dict[int, bool] = {}

    def instance_ids(self) -> Collection[int]:
        return [each for each in self._stage.instance_ids() if self._fitting.get(each, True)]

    def check(self, request: GenerateRequest) -> None:
        self._stage.check(request)

    async def pick(self, request: GenerateRequest) -> StageInstance:
        while True:
            picked = await self._stage.pick(request)
            if await self._fits(picked):
                return picked
            request = request.avoiding(picked.instance_id)

    async def _fits(self, instance: StageInstance) -> bool:
        known = self._fitting.get(instance.instance_id)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(_DESCRIBE_SECONDS):
                self._require_fit(await instance.describe())
        except ConfigError as error:
            log.error("instance %x is not called: %s", instance.instance_id, error)
            return self._remember(instance, False)
        except (DisaggError, TimeoutError):
            # Whoever calls it will see, and the next request asks again.
            return True
        return self._remember(instance, True)

    def _remember(self, instance: StageInstance, fits: bool) -> bool:
        there = self._stage.instance_ids()
        self._fitting = {each: known for each, known in self._fitting.items() if each in there}
        self._fitting[instance.instance_id] = fits
        return fits
