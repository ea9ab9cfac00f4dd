"""A worker whose engine dies ends with that reason, whatever else fails because it leaves."""

from __future__ import annotations

from typing import cast

import pytest

from tests.support.recording_pair import recording_engine
from trtllm_disagg.dynamo_runtime.shutdown import Leaving
from trtllm_disagg.engine.health import HealthTimes
from trtllm_disagg.errors import EngineLostError
from trtllm_disagg.worker.worker import leave_when_dead


class FakeLeaving:
    def leave(self, reason: str, grace_seconds: float = 0.0) -> None:
        """The worker of these tests is in no discovery."""


async def serve(error: Exception | None, death: str | None = None) -> None:
    engine = recording_engine()
    async with leave_when_dead(engine, cast(Leaving, FakeLeaving()), HealthTimes(), stall_seconds=0.0):
        if death is not None:
            engine.die(death)
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, ConnectionError("the runtime is shut down")])
async def test_the_death_of_the_engine_is_the_reason_also_if_another_step_fails_of_it(
    error: Exception | None,
) -> None:
    with pytest.raises(EngineLostError, match="the engine died: rank 3 is gone"):
        await serve(error, death="rank 3 is gone")


async def test_an_error_of_a_worker_with_a_living_engine_stays() -> None:
    with pytest.raises(ConnectionError, match="no discovery"):
        await serve(ConnectionError("no discovery"))
