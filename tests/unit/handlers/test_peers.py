"""An instance that comes later and does not fit is not called."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.handling import request, until
from tests.support.stage_client import SayingInstance
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError, NoInstanceError, PeerUnavailableError
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.types import GenerateRequest
from trtllm_disagg.worker.pairing import Fingerprint, ModelIdentity, describe_worker, require_callable


def described(role: str = "prefill", weights: str = "aaaa", **settings: Any) -> dict[str, Any]:
    config = WorkerConfig(model="m", engine="embedded", role=Role(role), **settings)
    return describe_worker(config, Fingerprint.of("embedded", {}, 32), ModelIdentity("m", "m", weights))


class Stage:
    """The first instance that is allowed."""

    def __init__(self, *said: dict[str, Any] | Exception | None) -> None:
        self.instances = {i: SayingInstance(i, each) for i, each in enumerate(said, start=1)}

    def instance_ids(self) -> Sequence[int]:
        return list(self.instances)

    def instance(self, instance_id: int) -> SayingInstance:
        return self.instances[instance_id]

    def check(self, request: GenerateRequest) -> None:
        """No instance is wished for."""

    async def pick(self, request: GenerateRequest) -> SayingInstance:
        for instance_id, instance in self.instances.items():
            if instance_id not in request.avoid:
                return instance
        raise NoInstanceError("none")


def fitting_peers(stage: Stage, clock: Clock | None = None) -> Peers:
    require_fit = partial(require_callable, described("decode"))
    return Peers(stage, CircuitBreaker(3, 5.0), {}, require_fit=require_fit, clock=clock or Clock())


async def test_incompatible_instance_is_skipped_and_logged_once_and_one_that_is_gone_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(described(weights="bbbb"), described())
    fits = fitting_peers(stage)
    with caplog.at_level(logging.ERROR):
        picked = [(await fits.pick(request())).instance_id for _ in range(3)]
    assert picked == [2, 2, 2]
    assert fits.instance_ids() == [2]
    assert [each.times_asked for each in stage.instances.values()] == [1, 1]
    (record,) = [each for each in caplog.records if each.name == "trtllm_disagg.handlers.peers"]
    assert "instance 1 is not called" in record.getMessage()
    assert "--model" in record.getMessage()
    stage.instances = {3: SayingInstance(3, described())}
    await fits.learn()
    assert fits.instance_ids() == [3]


async def test_without_a_fitting_instance_there_is_no_instance() -> None:
    fits = fitting_peers(Stage(described(weights="bbbb"), described(weights="cccc")))
    with pytest.raises(NoInstanceError):
        await fits.pick(request())
    assert fits.instance_ids() == []


async def test_while_a_deployment_switches_its_workers_have_two_strategies() -> None:
    other = described(strategy="prefill_first")
    assert (await fitting_peers(Stage(other)).pick(request())).instance_id == 1
    with pytest.raises(ConfigError, match="both workers are decode"):
        require_callable(described("decode"), described("decode"))


@pytest.mark.parametrize(
    ("first", "then", "is_called"),
    [
        (PeerUnavailableError("gone"), described(weights="bbbb"), False),
        (described(), described(weights="bbbb"), False),
        (described(weights="bbbb"), described(), True),
    ],
    ids=["silent", "fits no more", "was corrected"],
)
async def test_an_old_description_is_asked_for_again(
    first: dict[str, Any] | Exception, then: dict[str, Any], is_called: bool
) -> None:
    """Under Kubernetes a restarted pod has the id of the one before it."""
    stage, clock = Stage(first), Clock()
    peers = fitting_peers(stage, clock)
    await peers.learn()
    assert list(peers.instance_ids()) == ([] if is_called else [1])
    stage.instances[1].said, clock.now = then, 11.0
    await peers.learn()
    await until(lambda: not num_in_background())
    assert list(peers.instance_ids()) == ([1] if is_called else [])


class LateInstance(SayingInstance):
    def __init__(self, instance_id: int, said: dict[str, Any]) -> None:
        super().__init__(instance_id, said)
        self.may_answer = asyncio.Event()

    async def describe(self) -> dict[str, Any]:
        await self.may_answer.wait()
        return await super().describe()


async def test_a_request_that_comes_while_a_new_instance_is_asked_waits_for_its_description() -> None:
    stage, late = Stage(described()), LateInstance(1, described())
    stage.instances = {1: late}
    peers = fitting_peers(stage)
    learning = [asyncio.create_task(peers.learn()) for _ in range(2)]
    done, _ = await asyncio.wait(learning, timeout=0.01)
    assert not done
    late.may_answer.set()
    await asyncio.gather(*learning)


async def test_an_instance_that_does_not_fit_and_does_not_answer_is_not_called() -> None:
    stage, clock = Stage(described(weights="bbbb")), Clock()
    peers = fitting_peers(stage, clock)
    await peers.learn()
    stage.instances[1].said, clock.now = PeerUnavailableError("busy"), 11.0
    await peers.learn()
    await until(lambda: not num_in_background())
    assert (stage.instances[1].times_asked, list(peers.instance_ids())) == (2, [])


async def test_an_instance_that_fails_a_call_is_asked_for_its_description_again() -> None:
    stage = Stage(described())
    peers = fitting_peers(stage)
    call = await peers.pick(request())
    with pytest.raises(PeerUnavailableError), call:
        raise PeerUnavailableError("cannot connect")
    await peers.pick(request())
    assert stage.instances[1].times_asked == 2


@pytest.mark.parametrize(
    ("prefill", "weights"), [(False, [16, 64, 64]), (True, [1, 1, 1])], ids=["decode", "prefill"]
)
async def test_decode_workers_weigh_as_many_as_they_have_slots_and_prefill_workers_the_same(
    prefill: bool, weights: list[int]
) -> None:
    """A prompt fills a step, however many requests would fit into it."""
    small, ranks = {"max_batch_size": 16}, {"max_batch_size": 16, "num_ranks": 4}
    stage = Stage(small, ranks, PeerUnavailableError("silent"), ranks)
    peers = Peers(stage, CircuitBreaker(3, 5.0), {}, clock=Clock(), prefill=prefill)
    await peers.learn()
    assert peers.in_flight.weights.of([1, 2, 3]) == weights
    stage.instances = {1: stage.instances[1]}
    await peers.learn()
    assert peers.in_flight.weights.are_equal, "those that are gone count no more"
