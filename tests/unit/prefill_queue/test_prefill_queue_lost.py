"""A queue that was deleted in NATS is made anew, and only workers of one kind share one queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, ConsumerInfo
from nats.js.errors import NotFoundError

from tests.support.handling import collect, expected_tokens, request, tokens_of, until
from tests.support.queueing import Queueing, closing
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import QueueUnusableError
from trtllm_disagg.prefill_queue.broker import Broker, NatsClient, QueueLimits
from trtllm_disagg.prefill_queue.messages import CONSUMER, Answer, FromPuller, decode
from trtllm_disagg.worker.pairing import Fingerprint, ModelIdentity, describe_worker, kind_of

Hear = Callable[[Msg], Awaitable[None]]


@asynccontextmanager
async def administrator(queue: Queueing) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(queue.server.url)
    try:
        yield client.jetstream()
    finally:
        await client.close()


@pytest.mark.parametrize("what", ["stream", "consumer"])
async def test_deleted_stream_or_consumer_is_recreated_and_waiting_requests_fail(
    queue: Queueing, what: str
) -> None:
    pushing, watching = await queue.pusher(), await queue.pusher()
    waiting = asyncio.create_task(collect(pushing.generate, request(5)))
    await until(lambda: watching.watch.depth() == 1)

    async with administrator(queue) as admin:
        if what == "stream":
            await admin.delete_stream(queue.names.stream)
        else:
            await admin.delete_consumer(queue.names.stream, CONSUMER)

    # Sooner than the queue timeout.
    async with asyncio.timeout(15):
        with pytest.raises(QueueUnusableError, match="was deleted"):
            await waiting
        await until(lambda: watching.watch.depth() == 0)
        pulling = await queue.puller()
        assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)
    assert len(pulling.llm.results) == 1, "no caller waits for the other one any more"


async def test_pulling_continues_after_the_stream_was_deleted(queue: Queueing) -> None:
    pushing, pulling = await queue.pusher(), await queue.puller()
    assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)

    async with administrator(queue) as admin:
        await admin.delete_stream(queue.names.stream)

    async def answered() -> list[int]:
        """As the fallbacks would have it."""
        while True:
            try:
                return tokens_of(await collect(pushing.generate, request(5)))
            except QueueUnusableError:
                await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        assert await answered() == expected_tokens(5)
    assert len(pulling.llm.results) == 2


class HardOfHearing(Broker):
    """`hear_answer` in place of hearing an answer of a prefill worker."""

    hear_answer: Callable[[Hear, Msg], Awaitable[None]]

    @asynccontextmanager
    async def listening(self, subject: str, hear: Hear) -> AsyncIterator[None]:
        async def hear_or_not(message: Msg) -> None:
            if isinstance(decode(message.data, FromPuller), Answer):
                await self.hear_answer(hear, message)
            else:
                await hear(message)

        async with super().listening(subject, hear_or_not):
            yield


async def test_answer_received_late_is_used(queue: Queueing) -> None:
    """Its pusher stood still for longer than its worker waits for a word. The handoff may be used by then."""

    async def late(hear: Hear, message: Msg) -> None:
        await asyncio.sleep(0.4)
        await hear(message)

    queue.limits = QueueLimits(reply=0.1)
    broker = await HardOfHearing.connect(queue.server.url, queue.names, queue.limits)
    broker.hear_answer = late
    pushing, pulling = await queue.pusher(broker=broker), await queue.puller()

    assert tokens_of(await collect(pushing.generate, request(5))) == expected_tokens(5)
    assert len(pulling.llm.results) == 1


async def test_handoff_is_released_when_its_pusher_dies_with_the_answer(queue: Queueing) -> None:
    """NATS has delivered it to a puller that is gone by the time that a word is due."""
    ending: list[asyncio.Task[None]] = []

    async def dies(hear: Hear, message: Msg) -> None:
        # A task of its own: closing a connection ends those that listen to it, and this is one.
        ending.append(asyncio.create_task(broker.close()))

    queue.limits = QueueLimits(reply=0.2)
    broker = await HardOfHearing.connect(queue.server.url, queue.names, queue.limits)
    broker.hear_answer = dies
    pushing, _ = await queue.pusher(broker=broker), await queue.puller()
    asked = asyncio.create_task(collect(pushing.generate, request(5)))

    await until(lambda: ending)
    assert len(LLM.kv_store) == 1
    await until(lambda: len(LLM.kv_store) == 0)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


def described(**changes: Any) -> dict[str, Any]:
    config = WorkerConfig(model="m", role=changes.pop("role", Role.PREFILL), **changes.pop("config", {}))
    identity = ModelIdentity(config.model_name, "a/directory", changes.pop("weights", "abc"))
    args, block_size = changes.pop("engine_args", {"dtype": "float32"}), changes.pop("block_size", 16)
    return describe_worker(config, Fingerprint.of(config.engine, args, block_size, **changes), identity)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"weights": "other"}, False),
        ({"block_size": 32}, False),
        ({"engine_args": {"dtype": "bfloat16"}}, False),
        ({"config": {"served_model_name": "other"}}, False),
        ({"config": {"handoff_protocol": "two_phase"}}, False),
        # A switch changes the strategy, and the queue stays.
        ({"role": Role.DECODE}, True),
        ({"config": {"strategy": "prefill_first"}}, True),
    ],
)
def test_workers_that_could_not_serve_a_request_together_are_of_another_kind(
    change: dict[str, Any], is_same: bool
) -> None:
    assert (kind_of(described(**change)) == kind_of(described())) is is_same


async def test_deployments_of_another_kind_take_nothing_from_each_other(queue: Queueing) -> None:
    async with closing(Queueing(queue.server, namespace=queue.namespace, kind="other")) as others:
        stranger = await others.puller(0xBAD)
        pushing = await queue.pusher(timeout=1.5)
        with pytest.raises(Exception, match="no prefill worker has taken the request"):
            await collect(pushing.generate, request(5))
        assert stranger.llm.results == []

        await queue.puller(0xA)
        asked = request(5)
        assert tokens_of(await collect(pushing.generate, asked)) == expected_tokens(5)
        assert asked.trace.facts["prefill_instance"] == "a"


async def test_queue_age_includes_an_item_held_by_a_hanging_puller(queue: Queueing) -> None:
    """A puller that has asked for an item may hang; to JetStream it is not waiting any more then."""
    queue.limits = QueueLimits(ack=0.8)
    pushing = await queue.pusher()
    hung = await queue.connect()
    asking = asyncio.create_task(hung.pull(5.0))
    await asyncio.sleep(0.1)
    answer = asyncio.create_task(collect(pushing.generate, request(5)))
    assert await asking is not None

    await until(lambda: pushing.watch.age() > 0.4)
    assert pushing.watch.depth() == 1

    await queue.puller()
    assert tokens_of(await answer) == expected_tokens(5)
    assert (pushing.watch.depth(), pushing.watch.age()) == (0, 0.0)
    await hung.close()


class LateAnswers(NatsClient):
    """A question about the consumer is answered when `gate` opens: it is not there, or was made at another time."""

    def __init__(self, answer: Callable[[], ConsumerInfo]) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self._answer = answer

    def jetstream(self, *args: Any, **kwargs: Any) -> JetStreamContext:
        stream = super().jetstream(*args, **kwargs)

        async def consumer_info(*args: Any, **kwargs: Any) -> ConsumerInfo:
            self.asked.set()
            await self.gate.wait()
            return self._answer()

        stream.consumer_info = consumer_info  # type: ignore[method-assign]
        return stream


def not_there() -> ConsumerInfo:
    raise NotFoundError


def of_another_time(year: int = 2101) -> ConsumerInfo:
    return ConsumerInfo(
        name=CONSUMER, stream_name="", config=ConsumerConfig(), created=datetime(year, 1, 1, tzinfo=UTC)
    )


@pytest.mark.parametrize("answer", [not_there, of_another_time])
async def test_an_answer_from_before_nats_was_gone_loses_no_request(
    queue: Queueing, answer: Callable[[], ConsumerInfo]
) -> None:
    client = LateAnswers(answer)
    broker = await Broker.connect(queue.server.url, queue.names, client=client)
    lost: list[str] = []
    try:
        waiting = asyncio.create_task(broker.waiting())
        await client.asked.wait()
        await asyncio.to_thread(queue.server.kill)
        await until(lambda: not broker.is_usable)
        with pytest.raises(QueueUnusableError):
            await broker.waiting()
        await asyncio.to_thread(queue.server.start)
        async with asyncio.timeout(30):
            await broker.wait_until_usable()
        broker.on_lost(lost.append)
        client.gate.set()
        assert await waiting == (0, 1)
        assert lost == []
    finally:
        await broker.close()


async def test_a_consumer_that_nats_has_restored_is_the_same_queue(queue: Queueing) -> None:
    """A server that starts may make it anew, say so, and then restore the older one."""
    client = LateAnswers(lambda: of_another_time(2001))
    broker = await Broker.connect(queue.server.url, queue.names, client=client)
    lost: list[str] = []
    broker.on_lost(lost.append)
    client.gate.set()
    try:
        assert await broker.waiting() == (0, 1)
        assert lost == []
    finally:
        await broker.close()
