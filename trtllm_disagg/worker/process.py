"""What lives as long as a worker's process: its engine, the checks of the engine's health, and the order to stop."""

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

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.discovery import Clients
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime, ServedModel
from trtllm_disagg.engine.capabilities import block_size_of
from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import EngineHealth, HealthTimes, close, until_stalled
from trtllm_disagg.engine.llm_api import LlmApi
from trtllm_disagg.engine.rank_placement import Affinity
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.errors import ConfigError, EngineLostError
from trtllm_disagg.processes.reports import Reporter
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
    #: Of other workers; None where they end with the role term.
    clients: Clients | None = None
    life: Life = field(default_factory=Life)
    engine: Engine | None = None
    load_seconds: float = 0.0
    #: Of the engine's statistics and KV events.
    readers: EngineReaders | None = None
    #: What ends before the engine.
    _ended: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def load(self, machine_id: int) -> Engine:
        """Load the engine in the first role term. From then on its health is checked, and signals order to stop."""
        if self.engine is not None:
            return self.engine
        config = self.config
        label = worker_label(config.role, config.strategy)
        log.info("loading %s on the %s engine as %s", config.model, config.engine, label)
        self.reporter.tell("starting the engine")
        began = time.monotonic()
        by_router = config.conversation_affinity_dp_rank_source == "dynamo"
        affinity = Affinity(config.conversation_affinity, by_router=by_router)
        load = partial(Engine.open, self.api, self.engine_args, machine_id, affinity)
        engine = self.engine = await in_daemon_thread(load, "engine-load")
        self.load_seconds = time.monotonic() - began
        _tune_garbage_collector()
        for missing in engine.capabilities.missing():
            log.info("the engine cannot %s", missing)
        self._watch(engine)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.life.happened, Event.STOP)
        return engine

    async def read(self, block_size: int) -> EngineReaders:
        """The readers of the loaded engine, which begin with the first role term."""
        assert self.engine is not None
        if self.readers is None:
            readers = EngineReaders(self.engine, block_size, reads_statistics=self.config.reads_statistics)
            self.readers = await self._ended.enter_async_context(readers)
        return self.readers

    def _watch(self, engine: Engine) -> None:
        health = EngineHealth(engine, lambda reason: self.life.happened(Event.DIED), self._times)
        health.start()
        self._ended.callback(health.stop)
        if self.config.stall_seconds:
            watching = _watch_for_stalls(engine, health, self.config.stall_seconds)
            self._ended.callback(asyncio.create_task(watching, name="stalls").cancel)

    def require_engine(self, error: Exception | None = None) -> None:
        """Raises EngineLostError when the engine has died; `error`: what failed, perhaps because of that."""
        if self.engine is not None and self.engine.death is not None:
            if error is not None:
                log.warning("a step of this worker failed after its engine's death: %s", error)
            raise EngineLostError(f"the engine died: {self.engine.death}")

    async def open_runtime(self, config: WorkerConfig) -> Runtime:
        """Only the first role term fails without discovery; a later one waits for it."""
        if self.engine is not None:
            # Until its runtime reaches etcd, Dynamo holds the interpreter: no signal is heard, and no health checked.
            os.environ.setdefault("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "1")
        while True:
            try:
                return Runtime(config, clients=self.clients)
            except ConfigError as error:
                if self.engine is None:
                    raise
                log.warning("%s; the next attempt is in %g s", error, _REOPEN_SECONDS)
            await asyncio.sleep(_REOPEN_SECONDS)

    async def end(self) -> None:
        """Raises EngineLostError when the engine does not end in time."""
        if self.clients is not None:
            self.clients.close()
        if self.engine is not None:
            self.reporter.tell("ending the engine")
        await self._ended.aclose()
        if self.engine is None:
            return
        if not await close(self.engine, self._times):
            # Raised even while another error is: TensorRT-LLM's exit handler would wait without a limit.
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
    """Exclude what the start has made, and collect less often: requests rarely make cycles, and traversing all these
    objects takes a twentieth of the worker's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def worker_label(role: Role, strategy: str) -> str:
    """A worker's role and strategy, as logs and traces show them."""
    return "agg" if role is Role.AGG else f"{role}/{strategy}"


def served_model(config: WorkerConfig, engine: Engine) -> ServedModel:
    # TensorRT-LLM reports nothing of a cache whose manager counts no blocks; older versions cannot report any.
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
