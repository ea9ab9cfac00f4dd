"""Circuit breakers and idle timeouts of peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from tests.support.clock import Clock
from tests.support.day_one import Both, kinds
from tests.support.handling import ORDERS, collect, expected_tokens, request, tokens_of, until
from tests.support.recording_pair import Pair, make_pair
from tests.support.stage_client import FakeContext
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engines.recording.hard_edges import GENERATION_TRANSFER_ERROR
from trtllm_disagg.engines.recording.llm import RequestError, Script
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    KvTransferError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    StageTimeoutError,
)
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.idle_timeout import IdleTimer, StreamTimeouts, stream_timeouts_of
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.remote import RemoteAnswer, RemoteDecode, RemotePrefill
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate, GenerateRequest, Handoff, RequestContext

pytestmark = pytest.mark.usefixtures("no_leaks")

Call = Callable[[], AsyncGenerator[dict[str, Any], None]]


class Instance:
    def __init__(self, instance_id: int, call: Call) -> None:
        self.instance_id = instance_id
        self._call = call

    async def describe(self) -> dict[str, Any]:
        """Also where its calls fail."""
        return await anext(silent()) if self._call is silent else {}

    def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        return self._call()

    async def notify(self, notice: dict[str, Any]) -> None:
        """Nothing is told."""


class Stage:
    """Always the first one that is allowed, and not skipped if there is such a one."""

    def __init__(self, **calls: Call) -> None:
        self.calls = {int(name[1:]): call for name, call in calls.items()}

    def instance_ids(self) -> Sequence[int]:
        return list(self.calls)

    def instance(self, instance_id: int) -> Instance:
        return Instance(instance_id, self.calls[instance_id])

    def check(self, request: GenerateRequest) -> None:
        """Nothing is wished for."""

    async def pick(self, request: GenerateRequest) -> Instance:
        allowed = [each for each in self.calls if each not in request.avoid]
        for instance_id in [each for each in allowed if each not in request.skipped] or allowed:
            return self.instance(instance_id)
        raise NoInstanceError("none")


async def well() -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1]}
    yield {"token_ids": [2]}


async def falling_silent() -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1]}
    await asyncio.Event().wait()


async def hanging() -> AsyncGenerator[dict[str, Any], None]:
    """It describes itself."""
    await asyncio.Event().wait()
    yield {}


async def silent() -> AsyncGenerator[dict[str, Any], None]:
    await asyncio.Event().wait()
    yield {}


def failing(error: DisaggError, after: int = 0) -> Call:
    async def call() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(after):
            yield {"token_ids": [number]}
        raise error

    return call


def with_breaker(stage: Stage, clock: Clock | None = None, seconds: float = 30.0) -> Peers:
    breaker = CircuitBreaker(2, 5.0, clock or Clock())
    timeouts = dict.fromkeys(("prefill", "decode", "whole"), StreamTimeouts(seconds, 2 * seconds))
    return Peers(stage, breaker, timeouts)


async def call(stage: Peers, context: FakeContext | None = None) -> tuple[int, list[dict[str, Any]]]:
    with await stage.pick(request()) as called:
        answers = [
            a async for a in called.answers({"phase_request": {"phase": "prefill"}}, context or FakeContext())
        ]
    return called.instance_id, answers


async def fail(stage: Peers, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(DisaggError):
            await call(stage)


def breaking_worker(both: Both, role: Role, failures: int) -> tuple[Generate, LiveState]:
    config = WorkerConfig(model="org/model", role=role, strategy=f"{role}_first", breaker_failures=failures)
    live = LiveState.of(config, 4)
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    return build_generate(config, both.engines[role], both.clients[other], live), live


async def test_a_decode_that_fails_after_its_fetch_counts_once_although_its_drain_fails_too(
    tensorrt_llm: ModuleType,
) -> None:
    both = Both("prefill_first")
    both.engines[Role.DECODE].llm.scripts.append(Script(error=RequestError("broken"), error_at=1))
    generate, live = breaking_worker(both, Role.PREFILL, 2)
    assert tokens_of(await collect(generate, request(5))) == expected_tokens(5)
    await both.day_one("prefill_first").quiet()
    assert kinds(both.engines[Role.DECODE].llm) == ["generation_only"] * 2
    assert len(live.breaker.open()) == 0


async def test_a_prefill_worker_whose_kv_never_arrives_is_skipped_although_it_answers(
    tensorrt_llm: ModuleType,
) -> None:
    both = Both("decode_first")
    decode = both.engines[Role.DECODE]
    generate, live = breaking_worker(both, Role.DECODE, 2)
    counts = []
    for error in (GENERATION_TRANSFER_ERROR, None, *[GENERATION_TRANSFER_ERROR] * 2):
        if error is not None:
            decode.llm.scripts.append(Script(error=RequestError(error)))
        assert tokens_of(await collect(generate, request(5))) == expected_tokens(5)
        counts.append(len(live.breaker.open()))
    assert counts == [0, 0, 0, 1], "what arrives between two failures makes them no row"
    await both.day_one("decode_first").quiet()


async def test_kv_that_is_lost_with_its_client_counts_for_no_prefill_worker(tensorrt_llm: ModuleType) -> None:
    both, context = Both("decode_first"), FakeContext()
    decode, gate = both.engines[Role.DECODE], asyncio.Semaphore(0)
    decode.llm.scripts.append(Script(gate=gate, error=RequestError(GENERATION_TRANSFER_ERROR)))
    generate, live = breaking_worker(both, Role.DECODE, 1)
    answering = asyncio.create_task(collect(generate, request(5), context))
    await until(lambda: decode.llm.results)
    context.stop()
    gate.release()
    with pytest.raises(KvTransferError):
        await answering
    assert live.breaker.times_opened == 0
    await both.day_one("decode_first").quiet()


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("error", [PeerUnavailableError("x"), StageTimeoutError("x"), EngineError("x")])
async def test_breaker_opens_after_two_failures_and_closes_after_its_time(
    error: DisaggError, after: int
) -> None:
    clock = Clock()
    stage = with_breaker(Stage(i1=failing(error, after), i2=well), clock)
    await fail(stage)
    assert stage.num_healthy() == 2
    await fail(stage)
    assert stage.num_healthy() == 1
    assert (await call(stage))[0] == 2
    clock.now = 5.0
    assert stage.num_healthy() == 2
    await fail(stage)  # once more is enough now
    assert (await call(stage))[0] == 2


async def test_an_instance_that_recovers_starts_anew() -> None:
    clock = Clock()
    inner = Stage(i1=failing(PeerUnavailableError("x")), i2=well)
    stage = with_breaker(inner, clock)
    await fail(stage, 2)
    clock.now = 5.0
    inner.calls[1] = well
    assert (await call(stage))[0] == 1
    inner.calls[1] = failing(PeerUnavailableError("x"))
    await fail(stage)
    assert stage.num_healthy() == 2


@pytest.mark.parametrize("error", [InvalidRequestError("x"), OverloadedError("x")])
async def test_an_error_that_is_not_the_instances_fault_does_not_count(error: DisaggError) -> None:
    stage = with_breaker(Stage(i1=failing(error)))
    await fail(stage, 5)
    assert stage.num_healthy() == 1


async def test_with_every_instance_skipped_one_of_them_is_called() -> None:
    inner = Stage(i1=failing(PeerUnavailableError("x")))
    stage = with_breaker(inner)
    await fail(stage, 2)
    assert stage.num_healthy() == 0
    inner.calls[1] = well
    assert (await call(stage))[0] == 1


async def test_client_leaving_a_silent_instance_does_not_reset_its_failures() -> None:
    inner = Stage(i1=failing(PeerUnavailableError("x")))
    stage = with_breaker(inner)
    await fail(stage)
    inner.calls[1] = empty
    left = FakeContext()
    left.stop()
    assert await call(stage, left) == (1, [])
    inner.calls[1] = failing(PeerUnavailableError("x"))
    await fail(stage)
    assert stage.num_healthy() == 0


async def read_prefill(stage: Peers) -> object:
    return await RemotePrefill(stage, lambda asked: None, Notices(None))(request(), FakeContext())


async def read_decode(stage: Peers) -> object:
    answer = RemoteDecode(stage)(request(), FakeContext(), Handoff.not_ours())
    return [chunk async for chunk in answer]


async def read_whole(stage: Peers) -> object:
    return [chunk async for chunk in RemoteAnswer(stage, "prefill_first")(request(), FakeContext())]


async def unreadable() -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": "x"}


async def unreadable_later() -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1], "finish_reason": "stop"}
    yield {"token_ids": "x"}


async def breaking_off() -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1]}


async def empty() -> AsyncGenerator[dict[str, Any], None]:
    for chunk in list[dict[str, Any]]():
        yield chunk


@pytest.mark.parametrize(
    ("read", "answer", "said"),
    [
        *((read, unreadable, "unreadable answer") for read in (read_prefill, read_decode, read_whole)),
        *((read, unreadable_later, "unreadable answer") for read in (read_prefill, read_decode, read_whole)),
        *((read, breaking_off, "ended too early") for read in (read_decode, read_whole)),
        *((read, empty, "ended too early") for read in (read_decode, read_whole)),
    ],
)
async def test_an_answer_that_is_unreadable_or_has_no_finish_reason_counts_as_a_failure(
    read: Callable[[Peers], Awaitable[object]], answer: Call, said: str
) -> None:
    """Else each request calls that instance first, and falls back."""
    stage = with_breaker(Stage(i1=answer, i2=well))
    for _ in range(2):
        with pytest.raises(PeerUnavailableError, match=said) as raised:
            await read(stage)
        assert raised.value.peer == 1
    assert (await stage.pick(request())).instance_id == 2


@pytest.mark.parametrize(("answer", "said"), [(silent, r"0\.01 s"), (falling_silent, r"0\.02 s")])
async def test_a_silent_instance_is_named_at_its_deadline(answer: Call, said: str) -> None:
    """A frozen worker's connections stay."""
    stage = with_breaker(Stage(i7=answer), seconds=0.01)
    with pytest.raises(StageTimeoutError, match=f"instance 7 .*prefill within {said}") as caught:
        await call(stage)
    assert caught.value.peer == 7
    await fail(stage)
    assert stage.num_healthy() == 0


async def test_a_slow_reader_is_no_fault_of_an_instance() -> None:
    stage = with_breaker(Stage(i7=well), seconds=0.01)
    instance = await stage.pick(request())
    answers = []
    async for answer in instance.answers({"phase_request": {"phase": "prefill"}}, FakeContext()):
        answers.append(answer)
        await asyncio.sleep(0.05)
    assert len(answers) == 2


async def test_idle_timeout_restarts_with_each_chunk() -> None:
    async def slow() -> AsyncGenerator[dict[str, Any], None]:
        for number in range(6):
            await asyncio.sleep(0.2)
            yield {"token_ids": [number]}

    assert len((await call(with_breaker(Stage(i7=slow), seconds=0.5)))[1]) == 6


async def test_a_cancelled_task_stays_cancelled_when_the_timer_fires_too() -> None:
    async def wait() -> None:
        with IdleTimer(1) as timer:
            timer.start("answer", 0.0)
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_queue_depth_is_waiting_calls_minus_instances() -> None:
    stage = with_breaker(Stage(i1=hanging, i2=hanging))
    depths = []
    tasks = []
    for _ in range(4):
        tasks.append(asyncio.create_task(call(stage)))
        await asyncio.sleep(0)
        depths.append(stage.depth())
    assert depths == [0, 0, 1, 2]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert stage.depth() == 0


# -- in a worker


async def let_go(gate: asyncio.Semaphore, pair: Pair) -> None:
    """A decode that is given up runs on until its KV has arrived."""
    for _ in range(20):
        gate.release()
    await pair.idle()


@pytest.mark.parametrize("order", ORDERS)
async def test_hanging_second_stage_is_replaced_after_its_timeout(order: str) -> None:
    pair = make_pair(order, prefill_timeout=0.5, first_decode_token_timeout=0.5)
    second = pair.decode if order == "prefill_first" else pair.prefill
    gate = asyncio.Semaphore(0)
    second.scripts.append(Script(gate=gate))
    asked = request(4)
    chunks = await collect(pair.generate, asked)
    await let_go(gate, pair)
    assert tokens_of(chunks) == expected_tokens(4)
    assert asked.trace.strategy == "local"
    assert "within 0.5 s" in asked.trace.fallbacks[0]


@pytest.mark.parametrize(("order", "word"), [("prefill_first", "prefill"), ("decode_first", "decode")])
async def test_hanging_phase_on_the_own_engine_raises_stage_timeout(order: str, word: str) -> None:
    pair = make_pair(order, prefill_timeout=0.5, first_decode_token_timeout=0.5, on_missing_stage="fail")
    own = pair.prefill if order == "prefill_first" else pair.decode
    gate = asyncio.Semaphore(0)
    own.scripts.extend(Script(gate=gate) for _ in range(2))
    with pytest.raises(StageTimeoutError, match=f"{word} .*within 0.5 s"):
        await collect(pair.generate, request(4))
    await let_go(gate, pair)


@pytest.mark.parametrize(("style", "seconds"), [("context_first", 3.0), ("generation_first", 10.0)])
def test_decode_has_the_time_of_the_prefill_that_it_is_dispatched_with(style: str, seconds: float) -> None:
    config = WorkerConfig(
        model="m",
        role=Role.PREFILL,
        strategy="prefill_first",
        schedule_style=ScheduleStyle(style),
        prefill_timeout=7.0,
        first_decode_token_timeout=3.0,
    )
    assert stream_timeouts_of(config)["decode"].first == seconds
