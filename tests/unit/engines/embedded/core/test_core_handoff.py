"""Prefill in one engine core, decode in another, by every transport: right answers and exact accounting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.engines.embedded.scheduler.sequence import Status

BLOCK = 32


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """Prompts of different salts have no prefix in common."""
    return [2 + (salt * 37 + i * 7 + i * i) % 250 for i in range(num_tokens)]


@dataclass
class Pair:
    prefill: Core
    decode: Core
    agg: Core

    def generate(self, tokens: list[int], max_tokens: int = 8) -> list[int]:
        handoff = self.prefill.prefill(tokens)
        answer = self.decode.run(self.decode.add_decode(tokens, handoff, max_tokens))
        assert answer.error is None, answer.error
        return answer.tokens

    def pulled(self) -> int:
        """Bytes that the decode side has moved so far."""
        return int(self.decode.stats[-1]["totals"]["kvBytesPulled"]) if self.decode.stats else 0


@pytest.fixture(scope="module", params=tuple(TRANSPORTS))
def engines(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Pair]:
    backend = {"cache_transceiver_config": {"backend": request.param}}
    cores = [Core(checkpoints(), **backend), Core(checkpoints(), **backend), Core(checkpoints())]
    yield Pair(*cores)
    for core in cores:
        core.close()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """Whatever a test does: afterwards nothing is held, and the two still work together."""
    yield engines
    for core in (engines.prefill, engines.decode):
        core.assert_idle()
    tokens = prompt(40, salt=99)
    assert engines.generate(tokens) == engines.agg.generate(tokens)
    for core in (engines.prefill, engines.decode):
        core.assert_idle()


# -- the good case


def test_the_prompts_blocks_stay_leased_until_they_are_read(pair: Pair) -> None:
    tokens = prompt(3 * BLOCK, salt=3)
    free = pair.prefill.free_blocks
    handoff = pair.prefill.prefill(tokens)
    assert pair.prefill.free_blocks == free - 3
    assert pair.prefill.connector.num_leases == 1
    pair.decode.run(pair.decode.add_decode(tokens, handoff))
    pair.prefill.settle()
    assert pair.prefill.free_blocks == free


def test_a_prefill_that_stops_at_its_first_token_hands_nothing_off(pair: Pair) -> None:
    tokens = prompt(20, salt=6)
    first = pair.agg.generate(tokens, 1)[0]
    sampling = SamplingSpec(max_tokens=1, end_ids=(first,))
    answer = pair.prefill.run(pair.prefill.add(tokens, sampling=sampling, request_type="context_only"))
    assert (answer.tokens, answer.finish_reason, answer.handoff) == ([], "stop", None)
    assert pair.prefill.connector.num_leases == 0


# -- what the decode side has already


def test_a_prefix_that_decode_knows_is_not_moved_again(pair: Pair) -> None:
    stem = prompt(2 * BLOCK, salt=7)
    before = pair.pulled()
    pair.generate([*stem, 5])
    whole = pair.pulled() - before
    pair.generate([*stem, 6])
    assert pair.pulled() - before - whole == whole // 3, "one block of three"


def test_nothing_is_moved_when_decode_knows_every_block(pair: Pair) -> None:
    tokens = prompt(2 * BLOCK, salt=8)
    first = pair.generate(tokens)
    moved = pair.pulled()
    assert pair.generate(tokens) == first
    assert pair.pulled() == moved


def test_decode_reuses_in_later_turns_what_it_generated_itself(pair: Pair) -> None:
    tokens = prompt(BLOCK + 20, salt=9)
    longer = tokens + pair.generate(tokens, 20) + [7]
    before = pair.pulled()
    assert pair.generate(longer) == pair.agg.generate(longer)
    one_block = 4 * 2 * BLOCK * 2 * 16 * 4
    assert pair.pulled() - before == one_block, "72 of 73 tokens: two blocks are known, one is moved"


# -- giving up, at every point


@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING])
def test_a_prefill_can_be_aborted_at_any_point(pair: Pair, status: Status) -> None:
    request_id = pair.prefill.add(prompt(50, salt=11), request_type="context_only")
    if status is Status.RUNNING:
        list(pair.prefill.engine.scheduler.admit())
    assert pair.prefill.engine.scheduler.find(request_id)[0].status is status
    pair.prefill.engine.abort(request_id)
    answer = pair.prefill.run(request_id)
    assert (answer.finish_reason, answer.tokens, answer.handoff) == ("cancelled", [], None)


@pytest.mark.parametrize("status", [Status.WAITING, Status.RECEIVING, Status.RUNNING])
def test_a_decode_can_be_aborted_at_any_point(pair: Pair, status: Status) -> None:
    tokens = prompt(50, salt=12)
    handoff = pair.prefill.prefill(tokens)
    request_id = pair.decode.add_decode(tokens, handoff, 50)
    scheduler = pair.decode.engine.scheduler
    if status is Status.RECEIVING:
        for sequence in scheduler.admit():
            pair.decode.engine.connector.start(sequence)
    while status is Status.RUNNING and not scheduler.running:
        pair.decode.wait()
        pair.decode.step()
    assert scheduler.find(request_id)[0].status is status
    for _ in range(2):  # twice does no harm
        pair.decode.engine.abort(request_id)
    answer = pair.decode.run(request_id)
    assert answer.finish_reason == "cancelled"
    pair.decode.settle()
    pair.prefill.settle()  # by the decode side's Finish or release: long before the lease ends
    assert pair.prefill.engine.connector.num_leases == 0


def test_a_failed_step_fails_its_requests_and_no_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pair.decode
    ids = [core.add(prompt(40, salt=13), choices=2), core.add(prompt(40, salt=14))]
    with monkeypatch.context() as patch:
        patch.setattr(core.engine.model, "run", lambda rows: 1 / 0)
        outputs = core.step()
    assert [(o.request_id, o.error) for o in outputs] == [
        (i, "the forward pass failed: division by zero") for i in ids
    ]
    assert core.generate(prompt(40, salt=14)) == pair.agg.generate(prompt(40, salt=14))
