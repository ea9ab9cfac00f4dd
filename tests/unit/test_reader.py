"""One socket, several who could read it: every report is delivered once, in order, whatever the loops do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import uvloop

from trtllm_disagg.embedded.core_client import REPORTS
from trtllm_disagg.embedded.link import Link
from trtllm_disagg.embedded.messages import Report, StepReport
from trtllm_disagg.embedded.reader import ReportReader

NewLoop = Callable[[], asyncio.AbstractEventLoop]


@dataclass
class Engine:
    """The other side, and who read what it said."""

    link: Link[Report]
    ours: Link[Report]
    numbers: list[int] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.reader = ReportReader(self.ours, self._deliver)

    def say(self, *numbers: int) -> None:
        for number in numbers:
            self.link.send(StepReport([], num_active=number))

    def _deliver(self, report: Report) -> None:
        assert isinstance(report, StepReport)
        self.numbers.append(report.num_active)
        self.readers.append(threading.current_thread().name)
        self.arrived.release()

    async def heard(self, count: int) -> None:
        """So many more, while the loop is free."""
        for _ in range(count):
            assert await asyncio.to_thread(self.arrived.acquire, timeout=5)


@pytest.fixture
def engine() -> Iterator[Engine]:
    here, there = socket.socketpair()
    engine = Engine(Link(there, REPORTS), Link(here, REPORTS))
    yield engine
    engine.reader.close()
    engine.link.close()
    assert engine.ours.fileno() == -1, "closed, and by whoever had to"


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> NewLoop:
    made: NewLoop = request.param
    return made


def run(new_loop: NewLoop, main: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())  # type: ignore[arg-type]


def take(engine: Engine) -> bool:
    """What the thread does, once."""
    engine.reader.wait(5)
    return engine.reader.read()


def test_a_loop_reads_by_itself(engine: Engine, new_loop: NewLoop) -> None:
    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        engine.say(1, 2)
        await engine.heard(2)

    run(new_loop, main)
    assert (engine.numbers, set(engine.readers)) == ([1, 2], {"MainThread"})


def test_who_blocks_the_loop_has_the_thread_read(engine: Engine, new_loop: NewLoop) -> None:
    def thread_reads() -> None:
        while len(engine.numbers) < 2:
            engine.reader.wait(0.2)
            engine.reader.read()

    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        thread = threading.Thread(target=thread_reads, name="thread")
        thread.start()
        engine.reader.read_in_thread()
        engine.say(1)
        assert engine.arrived.acquire(timeout=5)
        # The loop finds out, leaves it to the thread, and may have it again.
        await asyncio.sleep(0)
        engine.reader.read_in(asyncio.get_running_loop())
        engine.say(2)
        await engine.heard(1)
        await asyncio.to_thread(thread.join)

    run(new_loop, main)
    assert engine.numbers == [1, 2]
    assert engine.readers[0] == "thread"


def test_a_look_is_enough_when_a_loop_is_blocked_without_a_word(engine: Engine, new_loop: NewLoop) -> None:
    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        take(engine)  # it was told of the loop
        engine.say(1)
        engine.reader.wait(0.01)
        assert engine.reader.read()

    run(new_loop, main)
    assert engine.numbers == [1]


def test_the_next_loop_follows_one_that_is_closed(engine: Engine, new_loop: NewLoop) -> None:
    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        engine.say(len(engine.numbers))
        await engine.heard(1)

    for _ in range(3):
        run(new_loop, main)
    assert engine.numbers == [0, 1, 2]


def test_a_loop_that_only_rests_can_be_overtaken_and_goes_on(engine: Engine, new_loop: NewLoop) -> None:
    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        engine.say(1)
        await engine.heard(1)

    resting = new_loop()
    resting.run_until_complete(main())
    run(new_loop, main)
    resting.run_until_complete(main())
    engine.reader.close()
    resting.run_until_complete(asyncio.sleep(0))
    resting.close()
    assert engine.numbers == [1, 1, 1]


def test_of_two_loops_one_reads(engine: Engine, new_loop: NewLoop) -> None:
    async def other() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        engine.say(1)
        await engine.heard(1)

    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        await asyncio.to_thread(run, new_loop, other)

    run(new_loop, main)
    assert (engine.numbers, engine.readers) == ([1], ["MainThread"])


def test_nothing_is_lost_or_turned_round_while_they_take_turns(engine: Engine, new_loop: NewLoop) -> None:
    count = 2000

    def thread() -> None:
        while len(engine.numbers) < count:
            engine.reader.wait(0.001)
            engine.reader.read()

    async def main() -> None:
        others = [threading.Thread(target=thread), threading.Thread(target=engine.say, args=range(count))]
        for other in others:
            other.start()
        while len(engine.numbers) < count:
            engine.reader.read_in(asyncio.get_running_loop())
            await asyncio.sleep(0)
            engine.reader.read_in_thread()
            await asyncio.sleep(0)
        for other in others:
            await asyncio.to_thread(other.join)

    run(new_loop, main)
    assert engine.numbers == list(range(count))


def test_what_the_loop_meets_is_for_the_thread_to_say(engine: Engine, new_loop: NewLoop) -> None:
    def read_on() -> None:
        for _ in range(3):  # told of the loop, told that it gave up, told once more
            take(engine)

    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        engine.say(7)
        engine.link.close()
        await engine.heard(1)
        with pytest.raises(EOFError):
            await asyncio.to_thread(read_on)

    run(new_loop, main)
    assert engine.numbers == [7]


def test_another_thread_closes_and_the_loop_goes_on_without(engine: Engine, new_loop: NewLoop) -> None:
    async def main() -> None:
        engine.reader.read_in(asyncio.get_running_loop())
        await asyncio.to_thread(engine.reader.close)
        await asyncio.sleep(0)
        assert engine.ours.fileno() == -1
        engine.reader.read_in(asyncio.get_running_loop())  # too late, and no harm
        engine.reader.read_in_thread()
        # What has its number now is watched like any other.
        here, there = socket.socketpair()
        with here, there:
            readable = asyncio.Event()
            asyncio.get_running_loop().add_reader(here, readable.set)
            there.send(b"x")
            await asyncio.wait_for(readable.wait(), 5)
            asyncio.get_running_loop().remove_reader(here)

    run(new_loop, main)
