"""What goes wrong between two engines ends in an error with a reason, and never costs blocks or other requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Answer, Core
from tests.support.fake_transport import FakeTransport, TakesTooLong
from tests.support.meeting import wait_until
from trtllm_disagg.engines.embedded.ipc.messages import MadeHandoff, SamplingSpec
from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.errors import ConfigError

BLOCK = 32
PROMPT = [5 + i % 11 for i in range(2 * BLOCK + 9)]
MakeCore = Callable[..., Core]
#: Prefill, decode, and decode's transport.
Faked = tuple[Core, Core, FakeTransport]


@pytest.fixture
def make_core(checkpoints: Checkpoints) -> Iterator[MakeCore]:
    made: list[Core] = []

    def make(backend: str | None = "SHARED_MEMORY", *, seed: int = 0, **args: Any) -> Core:
        made.append(Core(checkpoints(seed=seed), cache_transceiver_config={"backend": backend}, **args))
        return made[-1]

    yield make
    for core in made:
        core.close()


@pytest.fixture
def faked(make_core: MakeCore) -> Faked:
    fake = FakeTransport()
    return make_core(transport=FakeTransport()), make_core(transport=fake), fake


def pull(decode: Core, handoff: MadeHandoff, prompt: list[int] = PROMPT, max_tokens: int = 8) -> Answer:
    return decode.run(decode.add_decode(prompt, handoff, max_tokens))


# -- the other engine is gone


@pytest.mark.parametrize("known", [True, False], ids=["after a good pull", "never met"])
@pytest.mark.parametrize("backend", tuple(TRANSPORTS))
def test_a_sender_that_is_gone_means_unavailable(make_core: MakeCore, backend: str, known: bool) -> None:
    prefill, decode = make_core(backend), make_core(backend)
    if known:
        assert pull(decode, prefill.prefill(PROMPT[::-1]), PROMPT[::-1]).error is None
    handoff = prefill.prefill(PROMPT)
    prefill.close()
    answer = pull(decode, handoff)
    assert (answer.category, answer.tokens) == ("Unavailable", [])
    decode.assert_idle()
    successor = make_core(backend)
    assert pull(decode, successor.prefill(PROMPT)).error is None, "a failure must not stick"
    decode.assert_idle()


def test_a_receiver_that_is_gone_costs_the_sender_one_lease_time(make_core: MakeCore) -> None:
    prefill = make_core()
    prefill.prefill(PROMPT)
    leases = prefill.connector.sender.leases
    leases.seconds = 0.05
    handoff = prefill.prefill(PROMPT[::-1])
    assert prefill.connector.num_leases == 2
    while prefill.connector.num_leases == 2:
        prefill.wait()  # the lease's end is a deadline that the loop keeps by itself
        prefill.step()
    assert prefill.connector.num_leases == 1
    answer = pull(make_core(), handoff, PROMPT[::-1])
    assert (answer.category, answer.error) == (
        "Unavailable",
        f"the lease of {prefill.connector.sender.name} ended before the KV was read",
    )


@pytest.mark.parametrize("end", ["expired", "released"])
def test_nothing_is_read_once_the_lease_is_over(make_core: MakeCore, end: str) -> None:
    fake = FakeTransport()
    prefill, decode = make_core(transport=FakeTransport()), make_core(transport=fake)
    if end == "expired":
        prefill.connector.sender.leases.seconds = 0.0
    handoff = prefill.prefill(PROMPT)
    if end == "released":
        prefill.engine.abort(handoff.ctx_request_id)
    answer = pull(decode, handoff)
    assert fake.count("read") == 0
    assert answer.category == "Unavailable", "another prefill may succeed"
    for core in (prefill, decode):
        core.assert_idle()


# -- a read that may land later


def test_blocks_that_a_late_read_may_still_fill_are_never_used_again(faked: Faked) -> None:
    prefill, decode, fake = faked
    fake.then("read", TakesTooLong())
    answer = pull(decode, prefill.prefill(PROMPT))
    assert (answer.category, answer.error) == ("Unavailable", "took longer than 60 s")
    blocks = decode.engine.blocks
    assert blocks.num_quarantined == 3
    assert decode.free_blocks == blocks.num_blocks - 3
    decode.engine.blocks.check()
    (late,) = fake.transfers
    assert sorted(blocks.allocate(decode.free_blocks)) == [
        block for block in range(blocks.num_blocks) if block not in late.local
    ]


def test_blocks_of_a_late_read_come_back_once_it_has_ended(faked: Faked) -> None:
    prefill, decode, fake = faked
    late = TakesTooLong()
    fake.then("read", late)
    assert pull(decode, prefill.prefill(PROMPT)).error == "took longer than 60 s"
    blocks = decode.engine.blocks
    assert blocks.num_quarantined == 3
    late.ended.set()
    while blocks.num_quarantined:
        decode.wait()
        decode.step()
    assert decode.free_blocks == blocks.num_blocks
    decode.assert_idle()
    assert pull(decode, prefill.prefill(PROMPT)).error is None


def test_blocks_of_a_late_read_come_back_when_its_sender_is_dead(make_core: MakeCore) -> None:
    fake = FakeTransport()
    prefill = make_core(transport=FakeTransport())
    decode = make_core(transport=fake, timeouts=KvTimeouts(dead=1.0))
    fake.then("read", TakesTooLong())
    pull(decode, prefill.prefill(PROMPT))
    assert decode.engine.blocks.num_quarantined == 3
    prefill.close()
    closed = time.monotonic()
    while decode.engine.blocks.num_quarantined:
        decode.wait()
        decode.step()
    # A channel closes before its process has ended.
    assert time.monotonic() - closed >= 1.0
    decode.assert_idle()
    assert decode.free_blocks == decode.engine.blocks.num_blocks


@pytest.fixture
def shrinking(make_core: MakeCore) -> tuple[Core, Core]:
    """Prefill, and a decode engine of which the next read, a late one, takes 3 of the 5 blocks."""
    fake = FakeTransport()
    fake.then("read", TakesTooLong())
    prefill = make_core(transport=FakeTransport())
    return prefill, make_core(kv_cache_config={"max_tokens": 5 * BLOCK}, transport=fake)


def test_a_request_that_does_not_fit_into_the_pool_that_is_left_may_be_tried_elsewhere(
    shrinking: tuple[Core, Core],
) -> None:
    prefill, decode = shrinking
    first = decode.add_decode(PROMPT, prefill.prefill(PROMPT))
    too_big = decode.add([9] * 80, max_tokens=20)
    small = decode.add([9] * 8, max_tokens=20)
    decode.run(first, too_big, small)
    error = decode.answers[too_big, 0].error or ""
    assert "need 4 KV blocks of 32 tokens; the pool has 5, of which late transfers may still fill 3" in error
    assert decode.answers[small, 0].finish_reason == "length"
    late = decode.run(decode.add([9] * 80, max_tokens=20))
    assert late.category == "CapacityExhausted", "another engine may have room"
    never = decode.run(decode.add([9] * 160, max_tokens=20))
    assert never.category == "InvalidRequest"


def test_a_handoff_refused_for_lack_of_room_gives_its_lease_back(shrinking: tuple[Core, Core]) -> None:
    prefill, decode = shrinking
    assert pull(decode, prefill.prefill(PROMPT)).error == "took longer than 60 s"
    wait_until(lambda: prefill.connector.num_leases == 0)
    assert pull(decode, prefill.prefill(PROMPT)).category == "CapacityExhausted"
    wait_until(lambda: prefill.connector.num_leases == 0)


def test_a_handoff_that_fails_unexpectedly_at_its_start_gives_its_lease_back(make_core: MakeCore) -> None:
    prefill, decode = make_core(), make_core()
    decode.engine.guides = cast(Any, BrokenGuides())
    assert pull(decode, prefill.prefill(PROMPT)).category == "Internal"
    wait_until(lambda: prefill.connector.num_leases == 0)


def test_a_waiting_handoff_that_no_longer_fits_gives_its_lease_back(shrinking: tuple[Core, Core]) -> None:
    prefill, decode = shrinking
    first = decode.add_decode(PROMPT, prefill.prefill(PROMPT))
    second = decode.add_decode(PROMPT[::-1], prefill.prefill(PROMPT[::-1]))
    decode.run(first, second)
    assert "late transfers may still fill 3" in (decode.answers[second, 0].error or "")
    wait_until(lambda: prefill.connector.num_leases == 0)


# -- two engines that do not fit together


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"kv_cache_config": {"max_tokens": 1024, "tokens_per_block": 16}}, "tokens_per_block: prefill 32, decode 16"),
        ({"seed": 1}, "model: prefill "),
        ({"dtype": "bfloat16"}, "dtype: prefill 'float32', decode 'bfloat16'"),
        ({"backend": "NIXL"}, "the peer moves KV by SHARED_MEMORY, this engine by NIXL"),
    ],
    ids=["block size", "weights", "dtype", "transport"],
)  # fmt: skip
def test_handoff_between_different_engines_is_refused_with_the_difference(
    make_core: MakeCore, args: dict[str, Any], reason: str
) -> None:
    prefill, decode = make_core(), make_core(**args)
    answer = pull(decode, prefill.prefill(PROMPT))
    assert reason in (answer.error or "")
    assert (answer.category, answer.tokens) == ("InvalidRequest", [])
    decode.assert_idle()


# -- requests that cannot run


def test_an_answer_that_can_never_fit_is_refused_at_once(make_core: MakeCore) -> None:
    core = make_core(None, kv_cache_config={"max_tokens": 64})
    answer = core.run(core.add([3] * 60, max_tokens=6))
    assert "need 3 KV blocks of 32 tokens; the pool has 2" in (answer.error or "")
    assert len(core.generate([3] * 60, max_tokens=5)) == 5


class BrokenGuides:
    def start(self, sampling: SamplingSpec) -> None:
        raise ZeroDivisionError("a bug")


def test_an_unexpected_exception_at_its_start_fails_its_request_only(make_core: MakeCore) -> None:
    core = make_core(None)
    guides, core.engine.guides = core.engine.guides, cast(Any, BrokenGuides())
    answer = core.run(core.add(PROMPT))
    assert (answer.category, answer.error) == ("Internal", "the request could not be added: a bug")
    core.engine.guides = guides
    assert len(core.generate(PROMPT)) == 8
    core.assert_idle()


def test_a_step_must_hold_one_tile(make_core: MakeCore) -> None:
    with pytest.raises(ConfigError, match="max_num_tokens: 31 is not allowed; expected at least 32"):
        make_core(None, max_num_tokens=31)
