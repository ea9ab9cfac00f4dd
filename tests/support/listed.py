"""A worker in discovery without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.recording_pair import recording_engine
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.cards import Cards
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.dynamo_runtime.listing import ServedEndpoints
from trtllm_disagg.dynamo_runtime.registration import Registration
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime, ServedModel
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.types import Generate

MODEL = ServedModel(16, 8, 1, 64, 64)


class Listed:
    """`dynamo`: a stand-in of Dynamo's runtime; None: a real one."""

    def __init__(self, config: WorkerConfig, *, dynamo: Any = None) -> None:
        self.config = config
        self.runtime = Runtime(config, dynamo)
        self.served = ServedEndpoints(config, self.runtime)
        self.cards = Cards(config, self.runtime, Advertised(), MODEL)
        self.readers = EngineReaders(recording_engine(), MODEL.block_size, reads_statistics=False)
        self.registration = Registration(config, self.runtime, self.served, self.cards, self.readers)

    @property
    def instance_id(self) -> int:
        return self.runtime.instance_id

    async def serve(self, generate: Generate, describe: Callable[[], dict[str, Any]] = dict) -> None:
        """Serve until the runtime is shut down."""
        self.runtime.describe = describe
        await self.served.answer_with(Handler(generate, describe))
        await self.registration.list_for_peers()
        await self.served.until_ended()


@asynccontextmanager
async def serving(
    config: WorkerConfig, generate: Generate
) -> AsyncIterator[tuple[Listed, asyncio.Task[None]]]:
    worker = Listed(config)
    task = asyncio.create_task(worker.serve(generate))
    try:
        yield worker, task
    finally:
        worker.runtime.shutdown()
        await task
