"""GENERATION_FIRST between two engine cores: decode's blocks are filled by prefill while it computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.meeting import Duo, wait_until
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS

BLOCK = 32
BLOCK_BYTES = 4 * 2 * BLOCK * 2 * 16 * 4


@pytest.fixture(scope="module", params=tuple(TRANSPORTS))
def engines(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[tuple[Core, Core, Core]]:
    backend = {"cache_transceiver_config": {"backend": request.param}}
    chunked = {"enable_chunked_prefill": True, "max_num_tokens": 64}
    cores = Core(checkpoints(), **backend, **chunked), Core(checkpoints(), **backend), Core(checkpoints())
    yield cores
    for core in cores:
        core.close()


@pytest.fixture
def duo(engines: tuple[Core, Core, Core]) -> Iterator[Duo]:
    """Whatever a test does: afterwards nothing is held, and the two still work together."""
    prefill, decode, agg = engines
    duo = Duo(prefill, decode)
    yield duo
    duo.assert_idle()
    tokens = prompt(40, salt=199)
    assert duo.generate(tokens) == agg.generate(tokens)
    duo.assert_idle()


@pytest.fixture
def agg(engines: tuple[Core, Core, Core]) -> Core:
    return engines[2]


def totals(core: Core) -> dict[str, int]:
    return (
        dict(core.stats[-1]["totals"]) if core.stats else dict.fromkeys(("kvBytesPulled", "kvBytesSaved"), 0)
    )


# -- the good case


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 100, 300])
def test_two_stages_give_the_tokens_of_one(duo: Duo, agg: Core, num_tokens: int) -> None:
    tokens = prompt(num_tokens, salt=100 + num_tokens)
    assert duo.generate(tokens, 12) == agg.generate(tokens, 12)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_either_phase_may_arrive_first(duo: Duo, agg: Core, first: str) -> None:
    met = duo.request(prompt(70, salt=110 + len(first)))
    for side in ("prefill", "decode") if first == "prefill" else ("decode", "prefill"):
        if side == "prefill":
            duo.add_prefill(met)
        else:
            duo.add_decode(met)
        for _ in range(5):
            duo.step()
    duo.run()
    assert duo.answer(met).tokens == agg.generate(met.prompt)


def test_a_prefill_that_waits_for_its_decode_holds_no_blocks_and_no_place(duo: Duo, agg: Core) -> None:
    free = duo.prefill.free_blocks
    waiting = [duo.request(prompt(100, salt=120 + i)) for i in range(20)]
    for met in waiting:
        duo.add_prefill(met)
    duo.step()
    assert duo.prefill.free_blocks == free
    assert duo.prefill.engine.scheduler.num_active == 0
    tokens = prompt(50, salt=141)
    assert duo.prefill.generate(tokens) == agg.generate(tokens), "others go on"
    for met in waiting:
        duo.add_decode(met, 2)
    duo.run()
    assert [duo.answer(met).tokens for met in waiting] == [agg.generate(met.prompt, 2) for met in waiting]


def test_finished_chunks_are_pushed_while_later_ones_are_computed(duo: Duo) -> None:
    met = duo.both(prompt(300, salt=142))
    duo.run_until(lambda: any(s.num_computed for s in duo.prefill.engine.scheduler.running))
    (push,) = duo.prefill.connector._outgoing._pushed.values()
    wait_until(lambda: push.bytes_moved > 0)  # without a further step of the engine
    (sequence,) = duo.prefill.engine.scheduler.running
    assert 0 < sequence.num_computed < sequence.num_prompt, "the rest of the prompt is still to be computed"
    duo.run()
    assert duo.answer(met).error is None


def test_other_requests_step_while_kv_moves(duo: Duo) -> None:
    """Decode goes on with its other requests; the one that waits takes no part in steps."""
    other = duo.decode.add(prompt(20, salt=143), 100)
    met = duo.request(prompt(100, salt=144))
    duo.add_decode(met)
    before = len(duo.decode.answers[other, 0].tokens)
    for _ in range(30):
        duo.decode.step()
    assert len(duo.decode.answers[other, 0].tokens) - before >= 29
    assert not duo.answer(met).done
    duo.add_prefill(met)
    duo.run()


# -- what decode has already


def test_prefill_reads_what_decode_has_instead_of_computing_it(duo: Duo, agg: Core) -> None:
    stem = prompt(4 * BLOCK, salt=150)
    duo.decode.generate(stem, 1)  # decode knows it, prefill does not
    before, computed = totals(duo.decode), duo.prefill.stats[-1]["totals"]["prefillTokens"]
    tokens = [*stem, 5, 6, 7]
    met = duo.both(tokens)
    duo.run()
    assert duo.answer(met).tokens == agg.generate(tokens)
    assert duo.answer(met).cached_tokens == 4 * BLOCK
    assert duo.prefill.stats[-1]["totals"]["prefillTokens"] - computed == 3, "not one token of the stem"
    after = totals(duo.decode)
    assert after["kvBytesPulled"] - before["kvBytesPulled"] == BLOCK_BYTES, "only the last block was written"
    assert after["kvBytesSaved"] - before["kvBytesSaved"] == 4 * BLOCK_BYTES


def test_prefix_read_from_decode_is_cached_by_prefill(duo: Duo) -> None:
    stem = prompt(3 * BLOCK, salt=151)
    duo.decode.generate(stem, 1)
    duo.generate([*stem, 5])
    answer = duo.prefill.run(duo.prefill.add([*stem, 9], 1))
    assert answer.cached_tokens == 3 * BLOCK


def test_prompt_fully_cached_on_decode_moves_no_kv(duo: Duo) -> None:
    tokens = prompt(3 * BLOCK, salt=152)
    first = duo.generate(tokens)
    before = totals(duo.decode)
    assert duo.generate(tokens) == first
    after = totals(duo.decode)
    assert after["kvBytesPulled"] == before["kvBytesPulled"]
    assert after["kvBytesSaved"] - before["kvBytesSaved"] == 3 * BLOCK_BYTES


# -- metadata


def test_a_card_is_loaded_once_and_messages_do_not_grow_with_the_pool(duo: Duo) -> None:
    loads = (duo.prefill.connector.peers.metadata.loads, duo.decode.connector.peers.metadata.loads)
    for i in range(10):
        duo.generate(prompt(10, salt=160 + i), 2)
    now = (duo.prefill.connector.peers.metadata.loads, duo.decode.connector.peers.metadata.loads)
    assert [b - a for a, b in zip(loads, now, strict=True)] in ([0, 0], [1, 1])


# -- refusals


def test_the_offer_of_another_prompt_is_refused_on_both_sides(duo: Duo) -> None:
    met = duo.request(prompt(40, salt=170))
    duo.add_prefill(met)
    met.prompt = prompt(40, salt=171)
    duo.add_decode(met)
    duo.run()
    assert met.prefill is not None
    assert "another prompt" in str(duo.prefill.answers[met.prefill, 0].error)
    assert duo.answer(met).error is not None


def test_the_same_id_twice_is_refused(duo: Duo) -> None:
    met = duo.request(prompt(40, salt=172))
    first = duo.add_prefill(met)
    second = duo.add_prefill(met)
    duo.step()
    assert "in use" in str(duo.prefill.answers[second, 0].error)
    duo.prefill.engine.abort(first)
    duo.run()
