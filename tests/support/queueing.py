"""Workers around one prefill queue in this process, each with its NATS connection and recording LLM."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.handling import until
from tests.support.nats_server import NatsServer
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engines.recording.llm import LLM, Script
from trtllm_disagg.errors import PeerUnavailableError
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.idle_timeout import stream_timeouts_of
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.queued import PrefillQueue
from trtllm_disagg.handlers.selection import NoStage, RoundRobin, Selection, StageClient
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.prefill_queue.asking import Asking
from trtllm_disagg.prefill_queue.broker import Broker, QueueLimits
from trtllm_disagg.prefill_queue.taking import Room, Taking
from trtllm_disagg.prefill_queue.tickets import Names
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.types import Generate

_namespaces = itertools.count(1)


def worker_config(namespace: str, role: Role, strategy: str, max_tries: int = 1) -> WorkerConfig:
    return WorkerConfig(
        model="org/model",
        role=role,
        strategy=strategy,
        namespace=namespace,
        prefill_dispatch="queue",
        # The caller handles errors.
        max_tries=max_tries,
        on_missing_stage="fail",
    )


@dataclass
class PrefillWorkers:
    """The prefill workers in discovery."""

    by_id: dict[int, RecordingStageClient] = field(default_factory=dict)

    def instance_ids(self) -> list[int]:
        return list(self.by_id)

    def instance(self, instance_id: int) -> RecordingStageClient:
        return self.by_id[instance_id]


@dataclass
class Asker:
    asking: Asking
    broker: Broker
    peers: Peers
    generate: Generate
    llm: LLM
    running: AsyncExitStack

    async def close(self) -> None:
        await self.running.aclose()
        # A request's pending withdrawal would wait for the closed connection.
        await until(lambda: num_in_background() == 0)
        await self.broker.close()


@dataclass
class Taker:
    taking: Taking
    room: Room
    broker: Broker
    engine: Engine
    client: RecordingStageClient

    @property
    def llm(self) -> LLM:
        llm: LLM = self.engine.llm
        return llm

    async def die(self) -> None:
        """Act like a killed process still in discovery: no answers, nothing settled."""
        self.client.fails_with(PeerUnavailableError("connection refused"))
        await self.broker.close()
        await self.taking.close()


@dataclass
class Queueing:
    """One queue; closes everything that it makes."""

    server: NatsServer
    strategy: str = "decode_first"
    namespace: str = field(default_factory=lambda: f"test-{next(_namespaces)}")
    kind: str = "kind"
    limits: QueueLimits = field(default_factory=QueueLimits)
    max_tries: int = 1
    workers: PrefillWorkers = field(default_factory=PrefillWorkers)
    askers: list[Asker] = field(default_factory=list)
    takers: list[Taker] = field(default_factory=list)

    @property
    def names(self) -> Names:
        return Names.of(worker_config(self.namespace, Role.PREFILL, self.strategy), self.kind)

    async def connect(self) -> Broker:
        return await Broker.connect(self.server.url, self.names, self.limits)

    async def asker(
        self,
        timeout: float = 20.0,
        decode: StageClient | None = None,
        broker: Broker | None = None,
        *,
        may_answer_alone: bool = False,
    ) -> Asker:
        """A worker of the strategy's first stage, with a queue timeout in seconds. `decode`: its decode workers."""
        broker = broker or await self.connect()
        asking, running = Asking(broker, timeout), AsyncExitStack()
        await running.enter_async_context(asking.running())
        engine = recording_engine()
        role = Role(spec_of(self.strategy).entry_role or "decode")
        config = worker_config(self.namespace, role, self.strategy, self.max_tries)
        config = replace(config, on_missing_stage="local" if may_answer_alone else "fail")
        selection = Selection(self.workers, RoundRobin(), "prefill")
        peers = Peers(selection, CircuitBreaker(3, 60.0), stream_timeouts_of(config))
        queue = PrefillQueue(asking, peers)
        generate = build_generate(config, engine, decode or peers, queue=queue, instance_id=0xF)
        self.askers.append(Asker(asking, broker, peers, generate, engine.llm, running))
        return self.askers[-1]

    async def taker(
        self, instance_id: int = 0xA, max_prefills: int = 4, max_tokens: int = 1000, *, is_listed: bool = True
    ) -> Taker:
        """A prefill worker."""
        broker = await self.connect()
        engine = recording_engine()
        config = worker_config(self.namespace, Role.PREFILL, self.strategy)
        client = RecordingStageClient(build_generate(config, engine, NoStage()))
        client.instance_id = instance_id
        if is_listed:
            self.workers.by_id[instance_id] = client
        room = Room(max_prefills, max_tokens)
        engine.prefilling = room.prefilling
        taking = Taking(broker, instance_id, room)
        taking.start()
        self.takers.append(Taker(taking, room, broker, engine, client))
        return self.takers[-1]

    async def close(self) -> None:
        for asker in self.askers:
            await asker.close()
        for taker in self.takers:
            await taker.die()
            await taker.client.idle()


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


def blocked() -> tuple[Script, asyncio.Semaphore]:
    """A script that gives one token per permit."""
    gate = asyncio.Semaphore(0)
    return Script(gate=gate), gate


async def begun(
    taker: Taker, answer: Coroutine[Any, Any, Any]
) -> tuple[asyncio.Task[Any], asyncio.Semaphore]:
    """The answer to a blocked request that this worker's engine has begun."""
    script, gate = blocked()
    taker.llm.scripts.append(script)
    running = asyncio.create_task(answer)
    await until(lambda: taker.llm.results)
    return running, gate
