"""Prefills with an answer that does not arrive: no KV waits for a decode that never comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.day_one import INSTANCES, Both, kinds
from tests.support.handling import collect, expected_tokens, raw_request, request, tokens_of, until
from tests.support.recording_pair import leftover_tasks
from tests.support.stage_client import FakeContext, RecordingStageClient
from tests.support.trying import counts_of, trying
from tests.unit.handlers.test_images_in_orders import PROMPT, about
from trtllm_disagg.config.thresholds import Live, Thresholds
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import Script
from trtllm_disagg.errors import (
    InvalidRequestError,
    OverloadedError,
    PeerUnavailableError,
    RequestCancelledError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.admission import Admission, Queued
from trtllm_disagg.handlers.chain import PrefillService
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.idle_timeout import StreamTimeouts
from trtllm_disagg.handlers.local import LocalPrefill
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.recall import TIMES, Notices, Recalls, RecallTimes
from trtllm_disagg.handlers.remote import RemoteDrain
from trtllm_disagg.handlers.services import peers_of
from trtllm_disagg.handlers.trace import RequestEnd, RequestLog
from trtllm_disagg.types import MAX_ATTEMPTS, GenerateRequest, PhaseRequest
from trtllm_disagg.wire.bodies import decode_request

pytestmark = pytest.mark.usefixtures("tensorrt_llm")

Raw = dict[str, Any]


async def nothing_more() -> None:
    await asyncio.Event().wait()


class Lossy:
    """A pair in which the answers to the first prefills are lost on their way to the decode worker."""

    def __init__(
        self, num_lost: int = 1, lost: Callable[[], Awaitable[object]] = nothing_more, **settings: Any
    ) -> None:
        """`lost` is what the decode worker hears instead."""
        self._lost = lost
        self.both = Both("decode_first", settings)
        self.generate = self.both.handlers[Role.DECODE]
        self._way = self.both.clients[Role.PREFILL]
        self.send = self._way.call
        self._left = num_lost
        self._way.call = self._call  # type: ignore[method-assign]

    @property
    def contexts(self) -> int:
        return int(self.both.engines[Role.PREFILL].llm.held_contexts)

    def keep(self, clock: Callable[[], float] = time.monotonic, times: RecallTimes = TIMES) -> None:
        """The prefill worker's clock and times from now on."""
        way = self.both.clients[Role.DECODE]
        peers = peers_of(WorkerConfig(model="m", role=Role.PREFILL), way)
        phase = LocalPrefill(self.both.engines[Role.PREFILL], RemoteDrain(peers))
        recalls = Recalls(lambda: way.instance_ids(), 60.0, clock, times)
        prefill = PrefillService(phase, recalls)
        self._way.serve_by(replace(trying(prefill, resumes=False), notices=recalls))

    async def prefill(self, attempt: str, sender: int | None = INSTANCES[Role.DECODE]) -> Raw:
        """As a decode worker asks for it; what comes of the answer is the test's."""
        asked = {"phase": "prefill", "attempts": [attempt]} | ({} if sender is None else {"sender": sender})
        (answer,) = [
            each async for each in self.send(raw_request(phase_request=asked), FakeContext("one id"))
        ]
        return answer

    async def tell(self, stage: str, *attempts: str) -> None:
        await self._way.notify(
            {"token_ids": [], "phase_request": {"phase": stage, "attempts": list(attempts)}}
        )

    async def quiet(self) -> None:
        await until(lambda: not num_in_background())
        for client in self.both.clients.values():
            await client.idle()
        await until(lambda: not num_in_background())

    async def _call(self, request: Raw, context: Any) -> AsyncGenerator[Raw, None]:
        if self._left and request["phase_request"]["phase"] == "prefill":
            self._left -= 1
            (answer,) = [answer async for answer in self.send(request, FakeContext("one id"))]
            assert "disaggregated_params" in answer
            await self._lost()
            return
        async for answer in self.send(request, context):
            yield answer


@pytest.mark.parametrize("asks", [request(), about("red", token_ids=PROMPT[:3])], ids=["text", "images"])
@pytest.mark.parametrize("overtakes", [False, True], ids=["behind the answer", "before the answer"])
async def test_a_prefill_whose_answer_is_lost_as_the_client_leaves_leaves_no_context(
    overtakes: bool, asks: GenerateRequest
) -> None:
    """Dynamo drops what is on the way to a request that it has killed."""
    context = FakeContext()

    async def stopped() -> None:
        context.stop()

    lossy = Lossy(lost=stopped)
    if overtakes:
        send = lossy.send

        async def recalled_first(request: Raw, context: Any) -> AsyncGenerator[Raw, None]:
            await lossy.tell("recall", *request["phase_request"]["attempts"])
            async for answer in send(request, context):
                yield answer

        lossy.send = recalled_first
    with pytest.raises(RequestCancelledError):
        await collect(lossy.generate, asks, context)
    await lossy.quiet()
    assert lossy.contexts == 0


@pytest.mark.parametrize("ends", ["timeout", "cancelled"])
async def test_a_prefill_with_a_decode_worker_that_stops_waiting_as_it_answers_leaves_no_context(
    ends: str,
) -> None:
    """A worker that leaves cancels what still runs."""
    is_lost = asyncio.Event()

    async def lost() -> None:
        is_lost.set()
        await nothing_more()

    settings: dict[str, Any] = {"prefill_timeout": 0.2} if ends == "timeout" else {}
    lossy = Lossy(lost=lost, **settings)
    answer = asyncio.create_task(collect(lossy.generate, request()))
    await is_lost.wait()
    if ends == "timeout":
        assert tokens_of(await answer) == expected_tokens(5)
    else:
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
    await lossy.quiet()
    assert lossy.contexts == 0


async def test_a_recall_is_of_one_attempt_and_not_of_its_request() -> None:
    """The retry has the same request id."""
    lossy = Lossy()
    await lossy.prefill("first")
    await lossy.prefill("retry")
    await lossy.tell("recall", "first")
    await lossy.quiet()
    assert lossy.contexts == 1
    await lossy.tell("recall", "retry")
    await lossy.quiet()
    assert lossy.contexts == 0
    assert kinds(lossy.both.engines[Role.DECODE].llm) == ["generation_only"] * 2


async def test_recall_releases_a_prefill_that_ends_much_later() -> None:
    lossy, gate, clock = Lossy(), asyncio.Semaphore(0), Clock()
    lossy.keep(clock)
    lossy.both.engines[Role.PREFILL].llm.scripts.append(Script(gate=gate))
    prefill = asyncio.create_task(lossy.prefill("late"))
    await until(lambda: lossy.both.engines[Role.PREFILL].llm.num_running)
    await lossy.tell("recall", "late")
    clock.now = 2 * TIMES.notice
    gate.release()
    await prefill
    await lossy.quiet()
    assert lossy.contexts == 0


async def test_handoff_not_taken_by_a_dead_decode_worker_is_fetched_by_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lossy = Lossy()
    lossy.keep(times=RecallTimes(check=0.01, collect=0.0))
    way = lossy.both.clients[Role.DECODE]
    for number in range(5):
        await lossy.prefill(f"attempt {number}")
    await lossy.tell("fetched", "attempt 0", "attempt 1")
    await asyncio.sleep(0.05)
    assert lossy.contexts == 5, "the decode worker is there"
    monkeypatch.setattr(way, "instance_ids", lambda: [3])
    await until(lambda: lossy.contexts == 2)
    await lossy.quiet()
    assert kinds(lossy.both.engines[Role.DECODE].llm) == ["generation_only"] * 3


async def test_next_prefill_request_reports_the_previous_attempt_as_taken() -> None:
    lossy = Lossy(num_lost=0)
    way = lossy.both.clients[Role.PREFILL]
    for _ in range(3):
        await collect(lossy.generate, request())
    first, second, third = (call["phase_request"] for call in way.requests)
    assert "fetched" not in first
    assert [second["fetched"], third["fetched"]] == [first["attempts"], second["attempts"]]
    assert way.notices == []


async def test_taken_report_is_repeated_when_its_prefill_request_fails() -> None:
    instance, notices = RecordingStageClient(), Notices(sender=2)
    notices.fetched(instance, before := notices.new_attempt(instance))
    asked = notices.new_attempt(instance)
    assert asked.fetched == before.attempts
    notices.lost(instance, asked, OverloadedError("no room"))
    assert notices.new_attempt(instance).fetched == before.attempts


async def test_collected_taken_reports_are_sent_in_one_notice() -> None:
    lossy = Lossy(num_lost=0)
    way = lossy.both.clients[Role.PREFILL]
    answers = await asyncio.gather(*(collect(lossy.generate, request()) for _ in range(4)))
    assert [tokens_of(answer) for answer in answers] == [expected_tokens(5)] * 4
    await until(lambda: way.notices)
    sent = [call["phase_request"]["attempts"][0] for call in way.requests]
    (said,) = way.notices
    assert said["phase_request"]["phase"] == "fetched"
    assert sorted(said["phase_request"]["attempts"]) == sorted(sent)
    assert len(set(sent)) == 4


# -- which decode workers are gone


class Prefiller:
    """The prefill worker's side of 'decode worker 2 has an answer'."""

    def __init__(self, *, seen: bool = True, sender: int | None = 2, lease_seconds: float = 60.0) -> None:
        self.there = {2, 3} if seen else {3}
        self.clock = Clock()
        self.recalls = Recalls(lambda: self.there, lease_seconds, self.clock)
        self.num_taken_back = 0
        self.sender = sender
        self.answers("a", at=0.0)
        self.clock.now = TIMES.reported

    def answers(self, attempt: str, at: float) -> None:
        self.clock.now = at
        asked = PhaseRequest("prefill", attempts=(attempt,), sender=self.sender)
        self.recalls.answered(asked, self._take_back)

    def _take_back(self) -> None:
        self.num_taken_back += 1

    def looks(self, *there: set[int], at: float | None = None) -> int:
        self.clock.now = self.clock.now if at is None else at
        for self.there in there:
            self.recalls.check_senders()
        return self.num_taken_back


class Unreachable(RecordingStageClient):
    async def notify(self, notice: Raw) -> None:
        raise PeerUnavailableError("gone")


async def test_queued_prefill_whose_worker_does_not_confirm_its_recall_is_drained() -> None:
    recalls, drained = Notices(sender=1, recalls_unused=True), asyncio.Event()
    instance = Unreachable()
    recalls.free(instance, recalls.new_attempt(instance), drained.set)
    async with asyncio.timeout(5):
        await drained.wait()


async def test_recalls_of_unknown_attempts_are_remembered_up_to_a_number_and_a_time() -> None:
    """A sender of notices can name any number of attempts."""
    worker = Prefiller()
    for number in range(17):
        worker.recalls.recall([f"{number}-{i}" for i in range(MAX_ATTEMPTS)])
    worker.answers("0-0", at=TIMES.reported)
    assert worker.num_taken_back == 0
    worker.answers("16-0", at=TIMES.reported)
    assert worker.num_taken_back == 1
    worker.answers("16-1", at=TIMES.reported + TIMES.notice)
    assert worker.num_taken_back == 1


@pytest.mark.parametrize(
    ("settings", "there", "at", "taken_back"),
    [
        pytest.param({}, [{3}, {3}, {3}], None, 1, id="missing twice"),
        pytest.param({}, [{3}, {2, 3}, {3}, {2, 3}], None, 0, id="comes back"),
        # It asks before discovery has told of it.
        pytest.param({"seen": False}, [{3}, {3}], None, 0, id="never seen"),
        pytest.param({"seen": False}, [{3}, {2, 3}, {3}, {3}], None, 1, id="seen later"),
        pytest.param({}, [set(), set(), set()], None, 0, id="without a decode worker"),
        pytest.param({}, [set(), set(), set(), {4}], None, 1, id="with another one later"),
        pytest.param({}, [{3}, {3}], 60.0, 0, id="its lease has ended"),
        pytest.param({"sender": None}, [{3}, {3}], None, 0, id="unnumbered"),
    ],
)
async def test_kv_of_a_decode_worker_that_is_missing_at_two_looks_is_drained_by_another_one(
    settings: dict[str, Any], there: list[set[int]], at: float | None, taken_back: int
) -> None:
    assert Prefiller(**settings).looks(*there, at=at) == taken_back


async def test_an_answer_that_a_leaving_worker_may_still_report_is_not_taken_back() -> None:
    """A worker that drains is not in discovery any more, and answers the requests that it has."""
    worker = Prefiller()
    worker.looks({3}, at=1.0)
    worker.recalls.fetched(["a"])
    worker.answers("b", at=1.9)
    assert worker.looks({3}, at=2.0) == 0
    assert worker.looks({3}, at=3.8) == 0
    assert worker.looks({3}, at=3.9) == 1


# -- notices are no requests


async def test_notice_is_handled_by_a_worker_that_refuses_requests(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[PhaseRequest] = []

    class Sink:
        ended_requests = 0

        def ended(self, end: RequestEnd) -> None:
            self.ended_requests += 1

    class Listener(Recalls):
        def receive(self, notice: PhaseRequest) -> None:
            heard.append(notice)

    config = WorkerConfig(model="m", role=Role.PREFILL, max_queued_requests=1)
    sink = Sink()
    admission = Admission(Live(Thresholds.of(config)), Queued(requests=1))
    counts = counts_of(RequestLog(sinks=[sink]), admission=admission)
    serve = replace(trying([], counts=counts), notices=Listener(tuple, 60.0))
    notice = decode_request({"token_ids": [], "phase_request": {"phase": "recall", "attempts": ["a"]}})
    assert await collect(serve, notice) == []
    assert (len(heard), sink.ended_requests, caplog.text) == (1, 0, "")


async def test_delivered_notices_do_not_reset_the_failures_of_an_instance() -> None:
    silent = RecordingStageClient()
    breaker = CircuitBreaker(2, 60.0)

    async def call(request: Raw, context: Any) -> AsyncGenerator[Raw, None]:
        await asyncio.Event().wait()
        yield {}

    silent.call = call  # type: ignore[method-assign]
    client = Peers(silent, breaker, {"prefill": StreamTimeouts(0.01, 0.01)})
    for _ in range(2):
        instance = await client.pick(request())
        with pytest.raises(StageTimeoutError), instance:
            await anext(instance.answers(raw_request(phase_request={"phase": "prefill"}), None))
        await instance.instance.notify({"token_ids": [], "phase_request": {"phase": "recall"}})
    assert len(silent.notices) == 2
    assert len(breaker.open()) == 1


async def test_worker_that_refuses_notices_gets_one() -> None:
    class Older(RecordingStageClient):
        async def notify(self, notice: Raw) -> None:
            self.notices.append(notice)
            raise InvalidRequestError("phase_request: unknown stage")

    older, notices = Older(), Notices(sender=2, times=RecallTimes(collect=0.0))
    for _ in range(3):
        notices.fetched(older, notices.new_attempt(older))
        await leftover_tasks()
    assert len(older.notices) == 1


def test_body_with_too_many_taken_attempts_is_refused() -> None:
    named = [f"{number:x}" for number in range(MAX_ATTEMPTS + 1)]
    read = decode_request({"token_ids": [1], "phase_request": {"phase": "prefill", "fetched": named[1:]}})
    assert read.phase_request is not None
    assert read.phase_request.fetched == tuple(named[1:])
    with pytest.raises(InvalidRequestError, match="fetched"):
        decode_request({"token_ids": [1], "phase_request": {"phase": "prefill", "fetched": named}})


async def test_the_newest_attempts_are_named_when_there_are_too_many() -> None:
    instance, notices = RecordingStageClient(), Notices(sender=2)
    asked = [notices.new_attempt(instance) for _ in range(MAX_ATTEMPTS + 1)]
    for each in asked:
        notices.fetched(instance, each)
    assert notices.new_attempt(instance).fetched == tuple(each.attempts[0] for each in asked[1:])
