"""What peers can do to a prefill engine's book of offers, and for how long; and that none of them is overlooked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.clock import Clock
from trtllm_disagg.engines.embedded.kv_transfer.control import MAX_OFFER_SECONDS, Offer, Withdraw, new_ticket
from trtllm_disagg.engines.embedded.kv_transfer.push import OfferBook

LAYOUT = b"y" * 16


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> OfferBook:
    return OfferBook(LAYOUT, lambda: None, stop_seconds=1.0, clock=clock)


def offer(request: int, **changes: Any) -> Offer:
    made = Offer(
        request=request,
        ticket=new_ticket(),
        endpoint="unix:///decode/1",
        layout=LAYOUT,
        prompt=b"p" * 16,
        blocks=[0],
        num_known=0,
        seconds=MAX_OFFER_SECONDS,
    )
    return msgspec.structs.replace(made, **changes)


def test_offers_are_limited_until_old_ones_expire(book: OfferBook, clock: Clock) -> None:
    answers = [book.offered(offer(number)) for number in range(4097)]
    assert (answers.count(b"ok"), answers[-1]) == (4096, b"full")
    clock.now = MAX_OFFER_SECONDS
    assert book.offered(offer(5000)) == b"ok"


@pytest.mark.parametrize("seconds", [1e6, MAX_OFFER_SECONDS + 1, float("inf"), float("nan"), -1.0])
def test_offer_without_a_valid_duration_is_not_decoded(seconds: float) -> None:
    message = msgspec.msgpack.encode(offer(1, seconds=seconds))
    with pytest.raises(msgspec.ValidationError, match="seconds"):
        msgspec.msgpack.decode(message, type=Offer)


def test_offer_that_comes_while_the_engine_looks_for_news_is_news_at_its_next_look(
    book: OfferBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = book._has_news
    seen = news.is_set

    def look() -> bool:
        monkeypatch.undo()
        was_set = seen()
        book.offered(offer(1))
        return was_set

    monkeypatch.setattr(news, "is_set", look)
    assert [book.take_news() for _ in range(3)] == [False, True, False]


class Compared(int):
    """A request id that counts how often it is compared with another one."""

    count = 0

    def __eq__(self, other: object) -> bool:
        self.count += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_request_is_looked_for_among_thousands_of_withdrawn_ones_by_few_comparisons(
    book: OfferBook,
) -> None:
    for number in range(1, 5001):
        book.withdrawn(Withdraw(number, new_ticket()))
    last, forgotten, strange = Compared(5000), Compared(1), Compared(9000)
    assert [book.was_abandoned_by_decode(each) for each in (last, forgotten, strange)] == [True, False, False]
    assert max(each.count for each in (last, forgotten, strange)) < 10
