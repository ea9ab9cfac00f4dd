"""Whatever goes wrong between two engines that meet: no request hangs, no block is lost, none is used too early."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.fake_transport import FakeTransport, TakesTooLong, WaitsFor
from tests.support.meeting import Duo
from tests.support.models import VOCAB
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.kv_transfer.control import ControlClient, Notice
from trtllm_disagg.errors import KvTransferError

BLOCK = 32
MakeDuo = Callable[..., Duo]


@pytest.fixture
def make_duo(checkpoints: Checkpoints) -> Iterator[MakeDuo]:
    made: list[Duo] = []

    def make(seconds: float = 60.0, transport: FakeTransport | None = None, **args: Any) -> Duo:
        """`transport`: prefill's."""
        transceiver = {"backend": "SHARED_MEMORY", "kv_transfer_timeout_ms": round(seconds * 1000)}
        settings = {"cache_transceiver_config": transceiver, "enable_chunked_prefill": True}
        prefill, decode = (
            Core(checkpoints(), **(settings | {"max_num_tokens": 64} | args), transport=each)
            for each in (transport or FakeTransport(), FakeTransport())
        )
        made.append(Duo(prefill, decode))
        return made[-1]

    yield make
    for duo in made:
        duo.close()


@pytest.fixture
def held() -> tuple[FakeTransport, WaitsFor]:
    """(prefill's transport, what its writes wait for)."""
    fake, held = FakeTransport(), WaitsFor()
    fake.always("write", held)
    return fake, held


# -- one side never comes


def test_a_prefill_without_a_decode_ends_at_its_deadline(make_duo: MakeDuo) -> None:
    duo = make_duo(0.2)
    met = duo.request(prompt(40))
    request_id = duo.add_prefill(met)
    answer = duo.prefill.run(request_id)
    assert (answer.category, answer.error) == (
        "Unavailable",
        "no decode worker offered its blocks within 0.2 s",
    )
    duo.assert_idle()


def test_a_decode_without_a_prefill_ends_at_its_deadline(make_duo: MakeDuo) -> None:
    duo = make_duo(0.2)
    met = duo.request(prompt(40))
    answer = duo.decode.run(duo.add_decode(met))
    assert answer.category == "Unavailable"
    assert answer.error in (
        "prefill gave no notice within 0.2 s",
        f"prefill worker {duo.prefill.connector.sender.name} ended this request without a notice or a failure message",
    )
    duo.assert_idle()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_phase_that_comes_after_the_other_has_aborted_fails_at_once(make_duo: MakeDuo, side: str) -> None:
    duo = make_duo()
    met = duo.request(prompt(40))
    first, second = (duo.prefill, duo.add_decode) if side == "prefill" else (duo.decode, duo.add_prefill)
    request_id = duo.add_prefill(met) if side == "prefill" else duo.add_decode(met)
    duo.step()
    first.engine.abort(request_id)
    duo.assert_idle()
    late = second(met)
    duo.run()
    answer = (duo.decode if side == "prefill" else duo.prefill).answers[late, 0]
    assert (answer.category, "given up" in str(answer.error)) == ("Unavailable", True)
    duo.assert_idle()


def test_decode_aborted_before_its_admission_fails_the_prefill(make_duo: MakeDuo) -> None:
    duo = make_duo()
    met = duo.request(prompt(40))
    duo.add_prefill(met)
    request_id = duo.add_decode(met)  # not admitted yet: no core has stepped
    duo.decode.engine.abort(request_id)
    duo.run()
    assert "given up" in str(duo.prefill.answers[met.prefill or 0, 0].error)
    duo.assert_idle()


def test_an_offer_that_comes_after_it_was_withdrawn_is_not_taken(make_duo: MakeDuo) -> None:
    """On another connection, messages may overtake each other."""
    duo = make_duo()
    book = duo.prefill.connector.offers
    met = duo.request(prompt(40))
    request_id = duo.add_decode(met)
    duo.run_until(lambda: bool(book._open))
    ((offer, _),) = book._open.values()
    duo.decode.engine.abort(request_id)
    duo.run()
    duo.assert_idle()
    assert book.offered(offer) == b"withdrawn"
    assert not book._open


def test_an_endpoint_without_listener_is_noticed_at_once(make_duo: MakeDuo) -> None:
    duo = make_duo()
    met = duo.request(prompt(40))
    duo.prefill.close()
    answer = duo.decode.run(duo.add_decode(met))
    assert answer.category == "Unavailable"
    duo.decode.assert_idle()


def test_a_prefill_that_dies_is_noticed_long_before_the_deadline(make_duo: MakeDuo) -> None:
    duo = make_duo()
    met = duo.request(prompt(40))
    request_id = duo.add_decode(met)
    duo.run_until(lambda: bool(duo.prefill.connector.offers._open))
    duo.prefill.close()
    answer = duo.decode.run(request_id)
    # By its process, or by its end of the channel: whichever is seen first.
    assert re.search("is gone|closed by the peer", str(answer.error))
    duo.decode.assert_idle()


# -- one side gives up


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["alone", "computing", "writing"])
def test_abort_of_either_phase_at_any_point_ends_the_other(
    make_duo: MakeDuo, side: str, moment: str, held: tuple[FakeTransport, WaitsFor]
) -> None:
    fake, script = held
    duo = make_duo(transport=fake)
    met = duo.request(prompt(200))
    if moment == "alone":
        duo.add_prefill(met) if side == "prefill" else duo.add_decode(met)
        duo.step()
    else:
        duo.add_prefill(met)
        duo.add_decode(met)
        duo.run_until(lambda: any(s.num_computed for s in duo.prefill.engine.scheduler.running))
        if moment == "writing":
            assert script.begun.wait(20)
    core, request_id = (duo.prefill, met.prefill) if side == "prefill" else (duo.decode, met.decode)
    assert request_id is not None
    core.engine.abort(request_id)
    core.step()
    assert core.answers[request_id, 0].finish_reason == "cancelled"
    script.go.set()
    duo.run()
    duo.assert_idle()
    for other in (duo.prefill, duo.decode):
        assert other.engine.blocks.num_quarantined == 0


def test_blocks_that_are_written_to_are_not_used_before_the_writer_has_stopped(
    make_duo: MakeDuo, held: tuple[FakeTransport, WaitsFor]
) -> None:
    fake, script = held
    duo = make_duo(transport=fake)
    met = duo.both(prompt(3 * BLOCK - 8), 1)
    duo.run_until(script.begun.is_set)
    free = duo.decode.engine.blocks.num_available
    assert met.decode is not None
    duo.decode.engine.abort(met.decode)
    for _ in range(3):
        duo.decode.step()
    blocks = duo.decode.engine.blocks
    assert blocks.num_available == free, "three prompt blocks, and the answer has no more"
    assert duo.decode.engine.num_active > 0, "an engine that drains waits for the writer"
    script.go.set()
    duo.assert_idle()
    assert (blocks.num_available, blocks.num_quarantined) == (blocks.num_blocks, 0)


def test_a_writer_that_does_not_stop_costs_its_blocks_until_it_is_dead(make_duo: MakeDuo) -> None:
    fake = FakeTransport()
    duo = make_duo(transport=fake)
    fake.always("write", TakesTooLong())
    met = duo.both(prompt(3 * BLOCK))
    duo.run()
    assert duo.answer(met).category == "Unavailable"
    blocks = duo.decode.engine.blocks
    duo.run_until(lambda: blocks.num_quarantined == 3)
    duo.prefill.assert_idle()
    assert duo.decode.generate(prompt(70, salt=3)), "others go on with the rest of the pool"
    assert blocks.num_quarantined == 3
    duo.prefill.close()
    while blocks.num_quarantined:
        duo.decode.woken.wait(20)
        duo.decode.woken.clear()
        duo.decode.step()
    duo.decode.assert_idle()
    assert blocks.num_available == blocks.num_blocks


def test_blocks_of_a_late_write_come_back_once_it_has_ended(make_duo: MakeDuo) -> None:
    fake, landed = FakeTransport(), threading.Event()
    duo = make_duo(transport=fake)
    fake.then("write", TakesTooLong(landed))
    duo.both(prompt(3 * BLOCK))
    duo.run()
    blocks = duo.decode.engine.blocks
    duo.run_until(lambda: blocks.num_quarantined == 3)
    duo.prefill.assert_idle()
    landed.set()
    duo.run_until(lambda: not blocks.num_quarantined)
    assert duo.generate(prompt(3 * BLOCK)) == duo.prefill.generate(prompt(3 * BLOCK))
    duo.assert_idle()


def test_a_decode_that_is_gone_fails_the_prefill(make_duo: MakeDuo) -> None:
    duo = make_duo()
    met = duo.request(prompt(100))
    duo.add_decode(met)
    duo.run_until(lambda: bool(duo.prefill.connector.offers._open))
    duo.decode.close()
    request_id = duo.add_prefill(met)
    answer = duo.prefill.run(request_id)
    assert answer.category == "Unavailable"
    duo.prefill.assert_idle()


def test_prefix_read_of_an_aborted_decode_is_not_cached(make_duo: MakeDuo) -> None:
    fake = FakeTransport()
    duo = make_duo(transport=fake)
    stem = prompt(2 * BLOCK)
    duo.decode.generate(stem, 1)
    held = WaitsFor()
    fake.then("read", held)
    met = duo.both([*stem, 5])
    duo.run_until(held.begun.is_set)
    duo.decode.engine.abort(met.decode or 0)
    held.go.set()
    assert met.prefill is not None
    answer = duo.prefill.answers[met.prefill, 0]
    duo.run_until(lambda: answer.done)
    assert answer.category == "Unavailable"
    assert not duo.prefill.engine.blocks.key_of
    duo.decode.engine.abort(met.decode or 0)
    duo.run()
    duo.assert_idle()


@pytest.mark.parametrize("is_over", [False, True], ids=["while it runs", "when it has timed out"])
def test_blocks_of_a_late_read_stay_quarantined_when_the_request_is_aborted(
    make_duo: MakeDuo, is_over: bool
) -> None:
    fake, held, landed = FakeTransport(), WaitsFor(), threading.Event()
    duo = make_duo(transport=fake)
    stem = prompt(2 * BLOCK)
    duo.decode.generate(stem, 1)
    fake.then("read", TakesTooLong(landed, held))
    met = duo.both([*stem, 5])
    duo.run_until(held.begun.is_set)
    assert met.prefill is not None
    if is_over:
        duo.prefill.woken.clear()
        held.go.set()
        assert duo.prefill.woken.wait(held.seconds)
    duo.prefill.engine.abort(met.prefill)
    duo.prefill.step()
    held.go.set()
    blocks = duo.prefill.engine.blocks
    duo.run_until(lambda: blocks.num_quarantined == 2)
    landed.set()
    duo.run()
    duo.assert_idle()


def test_a_notice_that_is_lost_once_is_sent_again(make_duo: MakeDuo, monkeypatch: pytest.MonkeyPatch) -> None:
    duo = make_duo()
    lost: list[Any] = []
    send = ControlClient.ask

    def lose_first_notice(client: ControlClient, endpoint: str, message: Any, timeout: float) -> bytes:
        if isinstance(message, Notice) and not lost:
            lost.append(message)
            client.drop(endpoint)
            raise KvTransferError("the connection broke")
        return send(client, endpoint, message, timeout)

    monkeypatch.setattr(ControlClient, "ask", lose_first_notice)
    met = duo.both(prompt(40))
    duo.run()
    assert lost
    assert duo.answer(met).error is None
    duo.assert_idle()


def test_a_notice_whose_answer_is_lost_is_accepted_once_and_answered_twice(
    make_duo: MakeDuo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode generates already when prefill asks again."""
    duo = make_duo()
    answers: list[bytes] = []
    send = ControlClient.ask

    def lose_first_answer(client: ControlClient, endpoint: str, message: Any, timeout: float) -> bytes:
        answer = send(client, endpoint, message, timeout)
        if isinstance(message, Notice):
            answers.append(answer)
            if len(answers) == 1:
                client.drop(endpoint)
                raise KvTransferError("no answer within 5.0 s")
        return answer

    monkeypatch.setattr(ControlClient, "ask", lose_first_answer)
    met = duo.both(prompt(40))
    duo.run()
    assert met.prefill is not None
    assert answers == [b"taken", b"taken"]
    assert duo.answer(met).error is None
    assert duo.prefill.answers[met.prefill, 0].error is None
    duo.assert_idle()


def test_forged_notice_is_rejected(make_duo: MakeDuo) -> None:
    duo = make_duo()
    met = duo.request(prompt(40))
    duo.add_decode(met)
    duo.step()
    forged = Notice(bytes(16), 5, None, 0, 0, 0)
    assert duo.decode.connector.push_receiver.noticed(forged) == b"gone"
    duo.step()
    assert not duo.answer(met).done
    duo.add_prefill(met)
    duo.run()
    assert duo.answer(met).error is None
    duo.assert_idle()


def test_a_notice_of_a_token_that_the_model_has_not_is_the_prefill_engines_fault(make_duo: MakeDuo) -> None:
    duo = make_duo()
    met = duo.request(prompt(40))
    duo.add_decode(met)
    book = duo.prefill.connector.offers
    duo.run_until(lambda: bool(book._open))
    ((offer, _),) = book._open.values()
    notice = Notice(offer.ticket, VOCAB, None, 0, 0, 0)
    assert duo.decode.connector.push_receiver.noticed(notice) == b"taken"
    duo.run()
    answer = duo.answer(met)
    assert (answer.category, answer.tokens) == ("Unavailable", [])
    assert "prefill's first token is 258; expected a token id in [0, 258)" in (answer.error or "")
    duo.assert_idle()


# -- never a deadlock


@pytest.fixture(scope="module")
def small(checkpoints: Checkpoints) -> Iterator[Duo]:
    """Pools of eight blocks: two or three requests fill one."""
    prefill, decode = (
        Core(
            checkpoints(),
            cache_transceiver_config={"backend": "SHARED_MEMORY"},
            kv_cache_config={"max_tokens": 8 * BLOCK},
            max_seq_len=8 * BLOCK,
            max_batch_size=3,
            enable_chunked_prefill=True,
            max_num_tokens=64,
        )
        for _ in range(2)
    )
    duo = Duo(prefill, decode)
    yield duo
    duo.close()


_LENGTHS = st.integers(1, 3 * BLOCK)
_REQUESTS = st.lists(
    st.tuples(_LENGTHS, st.sampled_from(["stay", "stay", "prefill leaves", "decode leaves"])),
    min_size=1,
    max_size=7,
)


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(requests=_REQUESTS, data=st.data())
def test_requests_in_opposite_orders_never_block_each_other(
    small: Duo, requests: list[tuple[int, str]], data: st.DataObject
) -> None:
    """Each side gets them in an order of its own, more than fit, and any of them may give up in between."""
    sides = [(i, side) for i in range(len(requests)) for side in ("prefill", "decode")]
    # All is drawn before anything is asked for: an example that hypothesis cuts short must leave nothing behind.
    order = data.draw(st.permutations(sides))
    steps = data.draw(st.lists(st.integers(0, 2), min_size=len(sides), max_size=len(sides)))
    met = [small.request(prompt(length, salt=i)) for i, (length, _) in enumerate(requests)]
    for (i, side), num_steps in zip(order, steps, strict=True):
        if side == "prefill":
            small.add_prefill(met[i])
        else:
            small.add_decode(met[i], 3)
        for _ in range(num_steps):
            small.step()
    for each, (_, fate) in zip(met, requests, strict=True):
        if fate == "prefill leaves":
            small.prefill.engine.abort(each.prefill or 0)
        elif fate == "decode leaves":
            small.decode.engine.abort(each.decode or 0)
    small.run()
    for each, (_, fate) in zip(met, requests, strict=True):
        if fate == "stay":
            assert small.answer(each).error is None
            assert len(small.answer(each).tokens) == 3
    small.assert_idle()
