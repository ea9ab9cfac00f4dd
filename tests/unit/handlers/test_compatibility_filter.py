"""An instance that comes later and does not fit is not called."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.handling import request
from tests.support.stage_client import SayingInstance
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.select import CompatibilityFilter
from trtllm_disagg.types import GenerateRequest
from trtllm_disagg.worker.pairing import Fingerprint, ModelIdentity, describe_worker, require_callable


def described(role: str = "prefill", weights: str = "aaaa", **settings: Any) -> dict[str, Any]:
    config = WorkerConfig(model="m", engine="embedded", role=Role(role), **settings)
    return describe_worker(config, Fingerprint.of("embedded", {}, 32), ModelIdentity("m", "m", weights))


class Stage:
    """The first instance that is allowed."""

    def __init__(self, *said: dict[str, Any] | Exception | None) -> None:
        self.instances = {i: SayingInstance(i, each) for i, each in enumerate(said)}

    def instance_ids(self) -> Sequence[int]:
        return list(self.instances)

    def check(self, request: GenerateRequest) -> None:
        """No instance is wished for."""

    async def pick(self, request: GenerateRequest) -> SayingInstance:
        for instance_id, instance in self.instances.items():
            if instance_id not in request.avoid:
                return instance
        raise NoInstanceError("none")


def fitting_stage(stage: Stage, **settings: float) -> CompatibilityFilter:
    return CompatibilityFilter(stage, partial(require_callable, described("decode")), **settings)


async def test_incompatible_instance_is_skipped_and_logged_once_and_one_that_is_gone_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(described(weights="bbbb"), described())
    fits = fitting_stage(stage)
    with caplog.at_level(logging.ERROR):
        picked = [(await fits.pick(request())).instance_id for _ in range(3)]
    assert picked == [1, 1, 1]
    assert fits.instance_ids() == [1]
    assert [each.times_asked for each in stage.instances.values()] == [1, 1]
    (record,) = [each for each in caplog.records if each.name == "trtllm_disagg.handlers.select"]
    assert "instance 0 is not called" in record.getMessage()
    assert "--model" in record.getMessage()
    stage.instances = {2: SayingInstance(2, described())}
    await fits.pick(request())
    assert list(fits.fitting) == [2]


async def test_without_a_fitting_instance_there_is_no_instance() -> None:
    fits = fitting_stage(Stage(described(weights="bbbb"), described(weights="cccc")))
    with pytest.raises(NoInstanceError):
        await fits.pick(request())
    assert fits.instance_ids() == []


async def test_while_a_deployment_switches_its_workers_have_two_strategies() -> None:
    other = described(strategy="prefill_first")
    assert (await fitting_stage(Stage(other)).pick(request())).instance_id == 0
    with pytest.raises(ConfigError, match="both workers are decode"):
        require_callable(described("decode"), described("decode"))


async def test_an_instance_without_a_description_is_asked_again() -> None:
    stage = Stage(None)
    fits = fitting_stage(stage, describe_seconds=0.01)
    for said in (None, PeerUnavailableError("gone")):
        stage.instances[0].said = said
        assert (await fits.pick(request())).instance_id == 0
    stage.instances[0].said = described(weights="bbbb")
    with pytest.raises(NoInstanceError):
        await fits.pick(request())
