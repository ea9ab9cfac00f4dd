"""A paused request in the whole engine: it is counted, can be cancelled, and fails when it can never go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.fake_transport import FakeTransport, TakesTooLong

BLOCK = 16
MakeCore = Callable[..., Core]


@pytest.fixture
def make_core(checkpoints: Checkpoints) -> Iterator[MakeCore]:
    made: list[Core] = []

    def make(num_blocks: int = 8, **args: Any) -> Core:
        settings = {
            "kv_cache_config": {"max_tokens": num_blocks * BLOCK, "tokens_per_block": BLOCK},
            "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        }
        made.append(Core(checkpoints(), **(settings | args)))
        return made[-1]

    yield make
    for core in made:
        core.close()


def until_paused(core: Core) -> None:
    while not core.engine.scheduler.paused:
        core.step()


@pytest.fixture(params=[0, 8 * BLOCK], ids=["recomputed", "put aside"])
def paused(make_core: MakeCore, request: pytest.FixtureRequest) -> tuple[Core, list[int]]:
    """Three requests, of which one is paused."""
    core = make_core(embedded={"swap_tokens": request.param})
    ids = [core.add([5 + i] * 30, 50) for i in range(3)]
    until_paused(core)
    return core, ids


def test_paused_requests_are_counted(paused: tuple[Core, list[int]]) -> None:
    core, ids = paused
    (one,) = core.engine.scheduler.paused
    stats = core.stats[-1]
    assert stats["inflightBatchingStats"]["numPausedRequests"] == 1
    assert stats["inflightBatchingStats"]["numPausedKvTokens"] == len(one.tokens)
    assert (stats["numActiveRequests"], stats["numQueuedRequests"]) == (3, 0)
    core.run(*ids)
    assert core.stats[-1]["inflightBatchingStats"]["numPausedRequests"] == 0
    core.assert_idle()


def test_a_paused_request_can_be_cancelled(paused: tuple[Core, list[int]]) -> None:
    core, ids = paused
    victim = core.engine.scheduler.paused[0].request_id
    core.engine.abort(victim)
    core.run(*ids)
    assert core.answers[victim, 0].finish_reason == "cancelled"
    assert [core.answers[i, 0].finish_reason for i in ids if i != victim] == ["length"] * 2
    core.assert_idle()
    assert core.engine.scheduler.reservations.swap.num_used == 0


def test_a_running_request_that_can_never_end_in_a_pool_that_shrank_may_be_tried_elsewhere(
    make_core: MakeCore,
) -> None:
    transfer = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    fake = FakeTransport()
    prefill = make_core(16, **transfer, transport=FakeTransport())
    decode = make_core(8, **transfer, transport=fake)
    fake.then("read", TakesTooLong())
    prompt = [5 + i % 11 for i in range(3 * BLOCK)]
    handoff = prefill.prefill(prompt)
    too_long = decode.add([9] * 20, max_tokens=100)
    short = decode.add([9] * 20, max_tokens=30)
    decode.step()
    lost = decode.add_decode(prompt, handoff)
    decode.run(lost, too_long, short)
    assert decode.answers[lost, 0].error == "took longer than 60 s"
    answer = decode.answers[too_long, 0]
    assert "need 8 KV blocks of 16 tokens; the pool has 8, of which late transfers may still" in (
        answer.error or ""
    )
    assert answer.category == "CapacityExhausted", "another engine may have room"
    assert len(decode.answers[short, 0].tokens) == 30
    decode.assert_idle()


def test_a_request_with_two_choices_that_no_longer_fit_fails_once(make_core: MakeCore) -> None:
    transfer = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    fake = FakeTransport()
    prefill = make_core(16, **transfer, transport=FakeTransport())
    decode = make_core(8, **transfer, transport=fake)
    fake.then("read", TakesTooLong())
    prompt = [5 + i % 11 for i in range(3 * BLOCK)]
    handoff = prefill.prefill(prompt)
    too_long = decode.add([9] * 20, 100, choices=2)
    decode.step()
    lost = decode.add_decode(prompt, handoff)
    decode.run(lost)  # fails at a second error for one choice
    assert decode.answers[too_long, 0].category == "CapacityExhausted"
    decode.assert_idle()
