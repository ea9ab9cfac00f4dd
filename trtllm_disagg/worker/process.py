"""Lives as long as a worker's process: engine, health checks, and the signal to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trtllm_disagg.common.reports import Reporter
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.discovery import Clients
from trtllm_disagg.dynamo_runtime.image_loader import image_loader
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime, ServedModel
from trtllm_disagg.engine.capabilities import block_size_of
from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import EngineHealth, HealthTimes, close, stall_seconds, until_stalled
from trtllm_disagg.engine.image_inputs import ImageInputs
from trtllm_disagg.engine.llm_api import LlmApi
from trtllm_disagg.engine.rank_placement import Affinity
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.errors import ConfigError, EngineLostError
from trtllm_disagg.worker.life import Event, Life

log = logging.getLogger(__name__)

#: Thresholds of generations 0, 1 and 2 of the garbage collector; Python's defaults are 700, 10, 10.
_COLLECTOR_THRESHOLDS = 20_000, 20, 20
_REOPEN_SECONDS = 2.0


@dataclass(slots=True)
class WorkerProcess:
    config: WorkerConfig
    engine_args: dict[str, Any]
    api: LlmApi
    reporter: Reporter
    advertised: Advertised
    #: Clients of other workers; None if they end with the role term.
    clients: Clients | None = None
    life: Life = field(default_factory=Life)
    engine: Engine | None = None
    load_seconds: float = 0.0
    #: Readers of the engine's statistics and KV events.
    readers: EngineReaders | None = None
    #: Ends before the engine.
    _ended: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def load(self, machine_id: int) -> Engine:
        """Load the engine in the first role term, then check its health and handle stop signals."""
        if self.engine is not None:
            return self.engine
        config = self.config
        label = worker_label(config.role, config.strategy)
        log.info("loading %s on the %s engine as %s", config.model, config.engine, label)
        self.reporter.report("starting the engine")
        began = time.monotonic()
        by_router = config.conversation_affinity_dp_rank_source == "dynamo"
        affinity = Affinity(config.conversation_affinity, by_router=by_router)
        load_images = None
        if config.images is not None:  # importing Dynamo's loader takes seconds
            load_images = await in_daemon_thread(partial(image_loader, config.images), "image-loader")
        load = partial(Engine.open, self.api, self.engine_args, machine_id, affinity)
        engine = self.engine = await in_daemon_thread(load, "engine-load")
        if load_images is not None:
            engine.images = ImageInputs(load_images, getattr(engine.llm, "input_processor", None))
        self.load_seconds = time.monotonic() - began
        _tune_garbage_collector()
        for missing in engine.capabilities.missing():
            log.info("the engine cannot %s", missing)
        self._watch(engine)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.life.happened, Event.STOP)
        return engine

    async def read(self, block_size: int) -> EngineReaders:
        """The loaded engine's readers, started in the first role term."""
        assert self.engine is not None
        if self.readers is None:
            readers = EngineReaders(self.engine, block_size, reads_statistics=self.config.reads_statistics)
            self.readers = await self._ended.enter_async_context(readers)
        return self.readers

    def _watch(self, engine: Engine) -> None:
        health = EngineHealth(engine, lambda reason: self.life.happened(Event.DIED), self._times)
        health.start()
        self._ended.callback(health.stop)
        if seconds := self.stall_seconds:
            watching = _watch_for_stalls(engine, health, seconds)
            self._ended.callback(asyncio.create_task(watching, name="stalls").cancel)

    @property
    def stall_seconds(self) -> float:
        """0: never."""
        given = self.config.engine_stall_timeout
        is_derived = given is None and self.config.engine_spec.is_tensorrt_llm
        return stall_seconds(self.engine_args) if is_derived else given or 0.0

    def require_engine(self, error: Exception | None = None) -> None:
        """Raises EngineLostError if the engine has died, from `error`, which may be a consequence."""
        if self.engine is not None and self.engine.death is not None:
            if error is not None:
                log.warning("a step of this worker failed after its engine's death: %s", error)
            raise EngineLostError(f"the engine died: {self.engine.death}") from error

    async def open_runtime(self, config: WorkerConfig) -> Runtime:
        """Without discovery the first role term fails; later ones wait for it."""
        if self.engine is not None:
            # Until its runtime reaches etcd, Dynamo holds the interpreter, so no signal or health check works.
            os.environ.setdefault("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "1")
        while True:
            try:
                return Runtime(config, clients=self.clients)
            except ConfigError as error:
                if self.engine is None:
                    raise
                log.warning("%s; trying again in %g s", error, _REOPEN_SECONDS)
            await asyncio.sleep(_REOPEN_SECONDS)

    async def end(self) -> None:
        """Raises EngineLostError if the engine does not end in time."""
        if self.clients is not None:
            self.clients.close()
        if self.engine is not None:
            self.reporter.report("ending the engine")
        await self._ended.aclose()
        if self.engine is None:
            return
        if not await close(self.engine, self._times):
            # Raised even over another error: TensorRT-LLM's exit handler would wait without a limit.
            raise EngineLostError("the engine did not shut down in time (--engine-health-shutdown-timeout)")

    @property
    def _times(self) -> HealthTimes:
        config = self.config
        return HealthTimes.of(
            config.engine_health_check_interval,
            config.engine_health_check_timeout,
            config.engine_health_shutdown_timeout,
        )


async def _watch_for_stalls(engine: Engine, health: EngineHealth, seconds: float) -> None:
    reason = await until_stalled(engine, seconds)
    log.error("the engine is stalled: %s", reason)
    health.declare_dead(reason)


def _tune_garbage_collector() -> None:
    """Exclude the start's objects, and collect less often: requests rarely make cycles, and traversing all objects
    takes a twentieth of the worker's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def worker_label(role: Role, strategy: str) -> str:
    """A worker's role and strategy, for logs and traces."""
    return "agg" if role is Role.AGG else f"{role}/{strategy}"


def served_model(config: WorkerConfig, engine: Engine) -> ServedModel:
    # TensorRT-LLM reports no cache if the manager counts no blocks; older versions report none.
    capacity: dict[str, int] = {}
    with contextlib.suppress(AttributeError):
        capacity = engine.llm.get_kv_cache_capacity()
    return ServedModel(
        capacity.get("tokensPerBlock") or block_size_of(engine.llm) or config.kv_block_size,
        capacity.get("maxNumBlocks", 0),
        config.max_batch_size,
        config.max_num_tokens,
        engine.max_seq_len,
        engine.num_ranks,
    )
