"""Whatever is said about an item, and in whatever order: one answer is taken at most, and every other is refused."""

from __future__ import annotations

import asyncio
import sys
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import until
from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.prefill_queue.broker import QueueLimits, preserve_cancellation
from trtllm_disagg.prefill_queue.messages import Answer, Beat, Claim, Failed, FromPuller, Item
from trtllm_disagg.prefill_queue.nats_queue import DepthWatch, Room
from trtllm_disagg.prefill_queue.queue_client import Pushed

ID = uuid.uuid4().hex
#: A silent worker is lost after the queue timeout alone.
LIMITS = QueueLimits(claims=3, beat=0.0)


def item() -> Item:
    return Item(ID, ID, None, [], {})


def claim(attempt: int) -> Claim:
    return Claim(ID, attempt, 100 + attempt)


ATTEMPTS = st.integers(1, 5)
SAID = st.one_of(
    ATTEMPTS.map(claim),
    ATTEMPTS.map(lambda attempt: Beat(ID, attempt)),
    ATTEMPTS.map(lambda attempt: Answer(ID, attempt, {"attempt": attempt})),
    ATTEMPTS.map(lambda attempt: Failed(ID, attempt, "Internal", "broken")),
)


async def what_happens(said: list[FromPuller], takes: bool) -> None:
    replies: dict[int, list[bool]] = {}
    claims: list[Claim] = []
    pushed = Pushed(item(), 60.0, claims.append, LIMITS)
    for place, word in enumerate(said):
        replies[place] = []
        pushed.receive(word, replies[place].append)
    has_answer = pushed.outcome.done() and pushed.outcome.exception() is None
    if has_answer and takes:
        assert pushed.take() == {"attempt": claims[-1].attempt}
    pushed.close()

    granted = [said[place] for place, answers in replies.items() if True in answers]
    assert [word for word in granted if isinstance(word, Claim)] == claims
    assert len(claims) <= LIMITS.claims
    attempts = [each.attempt for each in claims]
    assert attempts == sorted(set(attempts)), "an older attempt never comes back"
    taken = [word for word in granted if isinstance(word, Answer)]
    assert len(taken) == (has_answer and takes)
    for place, word in enumerate(said):
        if isinstance(word, Claim | Answer):
            assert len(replies[place]) == 1, "each question has one answer"
        elif isinstance(word, Failed):
            assert True not in replies[place]


@given(said=st.lists(SAID, max_size=12), takes=st.booleans())
def test_pushed_item_takes_one_answer_and_replies_to_every_message(
    said: list[FromPuller], takes: bool
) -> None:
    asyncio.run(what_happens(said, takes))


async def test_silent_worker_times_out_and_beats_extend_the_timeout() -> None:
    pushed = Pushed(item(), 0.5, lambda claim: None, LIMITS)
    pushed.receive(claim(1), lambda yes: None)
    for _ in range(6):
        await asyncio.sleep(0.1)
        pushed.receive(Beat(ID, 1), lambda yes: None)
    assert not pushed.outcome.done()
    with pytest.raises(StageTimeoutError, match="the prefill worker 65 has fallen silent") as raised:
        await pushed.outcome
    assert raised.value.peer == 101
    pushed.close()


async def test_a_prefill_that_runs_gets_the_time_of_some_beats_however_short_the_queue_timeout_is() -> None:
    timeout, silence = 0.01, 60.0
    pushed = Pushed(item(), timeout, lambda claim: None, QueueLimits(beat=silence))
    pushed.receive(claim(1), lambda yes: None)
    await asyncio.sleep(2 * timeout)
    pushed.receive(Answer(ID, 1, {"attempt": 1}), lambda yes: None)
    assert pushed.take() == {"attempt": 1}
    pushed.close()


async def test_room_is_counted_in_items_and_tokens_and_there_again_when_an_item_leaves() -> None:
    room = Room(max_items=2, max_tokens=100)
    room.enter("long", 5000)
    assert not room.is_there
    waiting = asyncio.create_task(room.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    room.leave("long")
    await waiting
    room.enter("a", 1)
    await room.wait()
    room.enter("b", 1)
    assert [room.is_there] == [False]


async def test_a_cancel_that_comes_with_the_result_is_not_lost() -> None:
    async def ask(answer: asyncio.Future[int], keep: bool) -> int:
        waiting = asyncio.wait_for(answer, 5)
        return await (preserve_cancellation(waiting) if keep else waiting)

    async def cancelled_with_the_result(keep: bool) -> bool:
        answer = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(ask(answer, keep))
        await asyncio.sleep(0)
        answer.set_result(1)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert await cancelled_with_the_result(keep=True)
    if sys.version_info < (3, 12):
        assert not await cancelled_with_the_result(keep=False), "else there is no need for it"


class BrokenOnce:
    """A broker that answers first with an error that no layer foresees."""

    def __init__(self) -> None:
        self.asked = 0

    async def wait_until_usable(self) -> None:
        """It is."""

    async def waiting(self) -> tuple[int, int]:
        self.asked += 1
        if self.asked == 1:
            raise KeyError("num_pending")
        return 3, 7

    async def pushed_at(self, place: int) -> float | None:
        return None

    is_usable = True


async def test_the_depth_is_watched_on_after_an_unforeseen_error(caplog: pytest.LogCaptureFixture) -> None:
    broker = BrokenOnce()
    watch = DepthWatch(broker, list)  # type: ignore[arg-type]
    await watch.start()
    await until(lambda: watch.depth() == 3)
    await watch.stop()
    assert "looking at the prefill queue failed" in caplog.text
