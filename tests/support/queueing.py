"""Workers around one prefill queue in this process, each with a NATS connection and a recording LLM of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.handling import until
from tests.support.nats_server import NatsServer
from tests.support.recording_pair import recording_engine
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import NoInstanceError
from trtllm_disagg.handlers.cancellation import num_in_background
from trtllm_disagg.handlers.select import NoStage, StageClient, StageInstance
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.prefill_queue.broker import Broker, QueueLimits
from trtllm_disagg.prefill_queue.messages import Names
from trtllm_disagg.prefill_queue.nats_queue import DepthWatch, Puller, Room
from trtllm_disagg.prefill_queue.queue_client import QueueClient
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

_namespaces = itertools.count(1)


class NoWorkers(NoStage):
    """No worker can be asked but through the queue."""

    async def pick(self, request: GenerateRequest) -> StageInstance:
        raise NoInstanceError("no worker is there")


def worker_config(namespace: str, role: Role, strategy: str) -> WorkerConfig:
    return WorkerConfig(
        model="org/model",
        role=role,
        strategy=strategy,
        namespace=namespace,
        prefill_dispatch="queue",
        # What fails here is the caller's to know.
        max_tries=1,
        on_missing_stage="fail",
    )


@dataclass
class Pushing:
    client: QueueClient
    watch: DepthWatch
    broker: Broker
    generate: Generate
    llm: LLM
    listening: AsyncExitStack

    async def close(self) -> None:
        await self.watch.stop()
        await self.listening.aclose()
        # What a request has left to be withdrawn would wait for an answer of the closed connection.
        await until(lambda: num_in_background() == 0)
        await self.broker.close()


@dataclass
class Pulling:
    puller: Puller
    broker: Broker
    instance_id: int
    llm: LLM
    listening: AsyncExitStack

    async def die(self) -> None:
        """As a killed process: it answers no more, and nothing is settled."""
        await self.broker.close()
        await self.listening.aclose()
        await self.puller.close()

    async def leave(self) -> None:
        """As on a SIGTERM."""
        self.puller.stop()
        await self.puller.drained()


@dataclass(frozen=True)
class QueuedPrefills:
    """What a request path sees of a queue."""

    client: QueueClient
    watch: DepthWatch

    def depth(self) -> int:
        return self.watch.depth()


@dataclass
class Queueing:
    """One queue. What it makes, it closes."""

    server: NatsServer
    strategy: str = "decode_first"
    namespace: str = field(default_factory=lambda: f"test-{next(_namespaces)}")
    kind: str = "kind"
    limits: QueueLimits = field(default_factory=QueueLimits)
    pushers: list[Pushing] = field(default_factory=list)
    pullers: list[Pulling] = field(default_factory=list)

    @property
    def names(self) -> Names:
        return Names.of(worker_config(self.namespace, Role.PREFILL, self.strategy), self.kind)

    async def connect(self, kind: type[Broker] = Broker) -> Broker:
        return await kind.connect(self.server.url, self.names, self.limits)

    async def pusher(
        self, timeout: float = 20.0, stage: StageClient | None = None, broker: Broker | None = None
    ) -> Pushing:
        """A worker of the strategy's first stage, with a queue timeout in seconds."""
        broker = broker or await self.connect()
        client = QueueClient(broker, timeout)
        listening = AsyncExitStack()
        await listening.enter_async_context(client.listening())
        watch = DepthWatch(broker, client.waiting_ages)
        await watch.start()
        engine = recording_engine()
        role = Role(spec_of(self.strategy).entry_role or "decode")
        config = worker_config(self.namespace, role, self.strategy)
        queue = QueuedPrefills(client, watch)
        generate = build_generate(config, engine, stage or NoWorkers(), queue=queue, instance_id=0xF)
        self.pushers.append(Pushing(client, watch, broker, generate, engine.llm, listening))
        return self.pushers[-1]

    async def puller(
        self,
        instance_id: int = 0xA,
        max_items: int = 4,
        max_tokens: int = 1000,
        serve: Generate | None = None,
    ) -> Pulling:
        """A prefill worker. `serve` answers in the place of its engine."""
        broker = await self.connect()
        engine = recording_engine()
        config = worker_config(self.namespace, Role.PREFILL, self.strategy)
        generate = serve or build_generate(config, engine, NoStage())
        puller = Puller(broker, instance_id, Room(max_items, max_tokens), generate)
        listening = AsyncExitStack()
        await listening.enter_async_context(puller.listening())
        puller.start()
        self.pullers.append(Pulling(puller, broker, instance_id, engine.llm, listening))
        return self.pullers[-1]

    async def close(self) -> None:
        for pulling in self.pullers:
            await pulling.die()
        for pushing in self.pushers:
            await pushing.close()


@asynccontextmanager
async def queueing(server: NatsServer, strategy: str = "decode_first") -> AsyncIterator[Queueing]:
    async with closing(Queueing(server, strategy)) as queue:
        yield queue


@asynccontextmanager
async def closing(queue: Queueing) -> AsyncIterator[Queueing]:
    try:
        yield queue
    finally:
        await queue.close()


def raising(error: Exception) -> Generate:
    def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        raise error

    return generate


def blocked() -> tuple[Script, asyncio.Semaphore]:
    """A request that gets one token for each permit."""
    gate = asyncio.Semaphore(0)
    return Script(gate=gate), gate


async def begun(
    pulling: Pulling, answer: Coroutine[Any, Any, Any]
) -> tuple[asyncio.Task[Any], asyncio.Semaphore]:
    """The answer to a request that this worker has taken and that its engine has, blocked as above."""
    script, gate = blocked()
    pulling.llm.scripts.append(script)
    running = asyncio.create_task(answer)
    await until(lambda: pulling.llm.results)
    return running, gate
