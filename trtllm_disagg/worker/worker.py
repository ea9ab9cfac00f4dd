"""One worker, from its configuration to serving: every part of it is built here, in order, and wired by constructor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_disagg.admin.commands import Verifier
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.config.engine_args import dump_config
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.discovery import Clients
from trtllm_disagg.dynamo_runtime.publishers import create_publishers
from trtllm_disagg.dynamo_runtime.shutdown import Leaving, keep_in_discovery, leave_when_dead
from trtllm_disagg.dynamo_runtime.system_port import require_system_port
from trtllm_disagg.dynamo_runtime.worker_endpoint import DynamoRegistration, Runtime, ServedModel
from trtllm_disagg.engine.capabilities import block_size_of
from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import HealthTimes, close, probe
from trtllm_disagg.engine.llm_api import LlmApi, serve_as_rank
from trtllm_disagg.engine.rank_placement import Affinity
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.engine.trtllm_version import installed_version
from trtllm_disagg.errors import ConfigError, EngineLostError
from trtllm_disagg.handlers.admission import Admission
from trtllm_disagg.handlers.cancellation import WorkerDrain
from trtllm_disagg.handlers.decide import OtherOccupancy, StageOccupancy
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.run import RunCounts
from trtllm_disagg.handlers.select import (
    BestCached,
    InFlight,
    LeastLoaded,
    NoStage,
    Random,
    RoundRobin,
    Selection,
    Selector,
)
from trtllm_disagg.handlers.services import LiveState, build_generate, peers_of, watch_policy_file
from trtllm_disagg.handlers.trace import LinesTogether, RequestLog
from trtllm_disagg.model_directory import fingerprint
from trtllm_disagg.prefill_queue import PrefillQueue, open_prefill_queue
from trtllm_disagg.processes.reports import ACTIVITY_VARIABLE, DRAINING, SERVING, Reporter, reporter_of
from trtllm_disagg.tracing.tracer import Tracer, tracer_of
from trtllm_disagg.types import Generate
from trtllm_disagg.worker.model_facts import UNKNOWN_MODEL, read_model_facts
from trtllm_disagg.worker.pairing import (
    Fingerprint,
    ModelIdentity,
    describe_worker,
    kind_of,
    require_callable,
    with_engine,
)
from trtllm_disagg.worker.stage_state import StageState, flipped
from trtllm_disagg.worker.startup_checks import ModelNameGuard, StartupChecks

log = logging.getLogger(__name__)

#: Thresholds of generations 0, 1 and 2 of the garbage collector; Python's defaults are 700, 10, 10.
_COLLECTOR_THRESHOLDS = 20_000, 20, 20
_LOAD_SECONDS, _REOPEN_SECONDS = 1.0, 2.0


async def run_worker(config: WorkerConfig, engine_args: dict[str, Any], api: LlmApi) -> None:
    """Serve until told to stop. Raises ConfigError before anything is built, EngineLostError when the engine dies.

    The start, in order, after the settings (worker_command.py): this worker's description, the prefill queue, Dynamo's
    runtime, the engine, the client of the peers, the request path, serving, registration. `StartupChecks` compares it
    with other workers before the engine loads, before this worker enters discovery, and before it registers. A flip
    does all of it again, in the other role, but for the engine.
    """
    reporter = reporter_of(os.environ)
    # On a rank other than 0 this call serves the engine until its end, and nothing else runs there.
    if serve_as_rank(config.engine, engine_args):
        return
    if config.server_disable_gc:
        gc.disable()
    process = _Process(
        config,
        engine_args,
        api,
        reporter,
        await asyncio.to_thread(Advertised.of, config, engine_args),
        Clients(config) if config.discovery_backend == "file" else None,
    )
    try:
        await serve_in_turns(Turn(config), partial(_serve_as, process), process.told_to_stop)
    finally:
        await process.end()


@dataclass(slots=True)
class Turn:
    """One role of a worker, from its start in that role to its end."""

    config: WorkerConfig
    #: Its state; before its start that of the role before, None in the first one.
    live: LiveState | None = None
    #: The instance id in the role before, hexadecimal.
    flipped_from: str = ""
    is_ready: bool = False


@dataclass(slots=True)
class _Process:
    """What outlives a worker's role: its engine, the readers of that, and the order to stop."""

    config: WorkerConfig
    engine_args: dict[str, Any]
    api: LlmApi
    reporter: Reporter
    advertised: Advertised
    #: Of other workers; None where they end with the role.
    clients: Clients | None
    engine: Engine | None = None
    load_seconds: float = 0.0
    told_to_stop: asyncio.Event = field(default_factory=asyncio.Event)
    #: Of the engine, once it is loaded.
    reading: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    readers: EngineReaders | None = None

    async def read(self, block_size: int) -> EngineReaders:
        """The readers of the loaded engine, which begin with the first role."""
        assert self.engine is not None
        if self.readers is None:
            readers = EngineReaders(self.engine, block_size, reads_statistics=self.config.reads_statistics)
            self.readers = await self.reading.enter_async_context(readers)
        return self.readers

    async def load(self, machine_id: int) -> Engine:
        """Load the engine, unless a role before has. From then on SIGTERM and SIGINT are the order to stop."""
        if self.engine is not None:
            return self.engine
        config = self.config
        label = _worker_label(config.role, config.strategy)
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
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.told_to_stop.set)
        return engine

    async def end(self) -> None:
        """Raises EngineLostError when the engine does not end in time."""
        if self.clients is not None:
            self.clients.close()
        if self.engine is None:
            return
        self.reporter.tell("ending the engine")
        await self.reading.aclose()
        if not await close(self.engine, _health_times(self.config)):
            # Raised even while another error is: TensorRT-LLM's exit handler would wait without a limit.
            raise EngineLostError("the engine did not shut down in time (--engine-health-shutdown-timeout)")


async def serve_in_turns(
    turn: Turn, serve: Callable[[Turn], Awaitable[Turn | None]], told_to_stop: asyncio.Event
) -> None:
    """Serve in one role after another; `serve` returns the next one. A worker that cannot enter a role returns to the
    one before. Raises what a role in use raises, and what the return raises.
    """
    before: Turn | None = None
    while not told_to_stop.is_set():
        try:
            following = await serve(turn)
        except Exception as error:
            if before is None or turn.is_ready or isinstance(error, EngineLostError):
                raise
            log.error("this worker cannot be a %s worker: %s", turn.config.role, error)
            turn, before = replace(before, flipped_from=turn.flipped_from, is_ready=False), None
        else:
            if following is None:
                return
            turn, before = following, turn


async def _serve_as(process: _Process, turn: Turn) -> Turn | None:
    """Serve in one role. Returns the next one; None when this worker was told to stop."""
    config = turn.config
    dump_config(config, process.engine_args)
    identity, own = _describe(config, process.engine_args)
    own |= {"flipped_from": turn.flipped_from, "process": Path(os.environ.get(ACTIVITY_VARIABLE, "")).stem}
    async with aclosing(await open_prefill_queue(config, kind_of(own))) as queue:
        require_system_port(os.environ)
        if (runtime := await _open_runtime(process, config)) is None:
            return None
        own_endpoint_ids = {config.endpoint_id, config.worker_endpoint_id}
        names = ModelNameGuard(identity, runtime.instance_id, own_endpoint_ids, runtime.list_instances)
        worker = _Worker(
            process,
            turn,
            config,
            runtime,
            queue,
            StartupChecks(config, names, runtime),
            _verifier(config, runtime.instance_id),
            process.reporter,
            tracer_of(os.environ, _worker_label(config.role, config.strategy), f"{runtime.instance_id:x}"),
        )
        to = await worker.run(own)
    if to is None:
        return None
    following = config if to is config.role else flipped(config, to)
    return Turn(following, turn.live, f"{runtime.instance_id:x}")


async def _open_runtime(process: _Process, config: WorkerConfig) -> Runtime | None:
    """None for a worker that was told to stop while discovery could not be reached. At its first start it does not wait
    for discovery.
    """
    while not process.told_to_stop.is_set():
        try:
            return Runtime(config, process.advertised, clients=process.clients)
        except ConfigError as error:
            if process.engine is None:
                raise
            log.warning("%s; the next attempt is in %g s", error, _REOPEN_SECONDS)
        await asyncio.sleep(_REOPEN_SECONDS)
    return None


def _describe(config: WorkerConfig, engine_args: dict[str, Any]) -> tuple[ModelIdentity, dict[str, Any]]:
    """The model of this worker, and the description that other workers get."""
    facts = read_model_facts(config.model)
    shares = facts if config.engine_spec.is_tensorrt_llm else UNKNOWN_MODEL
    identity = ModelIdentity(
        config.model_name,
        config.model,
        _weights(config),
        shares.layout,
        shares.precision,
        config.role.value,
        config.may_switch,
    )
    fingerprint = Fingerprint.of(
        config.engine, engine_args, config.kv_block_size, facts, installed_version(), os.environ
    )
    of_role = {
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "overlap_scheduler": not engine_args.get("disable_overlap_scheduler"),
        "context_parallel_size": engine_args.get("context_parallel_size") or 1,
    }
    return identity, describe_worker(config, fingerprint, identity) | of_role


@dataclass(frozen=True, slots=True)
class _Worker:
    """All parts of a worker in one role but its engine, which is loaded only after everything else has been checked."""

    process: _Process
    turn: Turn
    config: WorkerConfig
    runtime: Runtime
    queue: PrefillQueue
    checks: StartupChecks
    verifier: Verifier
    reporter: Reporter
    tracer: Tracer
    drain: WorkerDrain = field(default_factory=WorkerDrain)
    lines: LinesTogether = field(default_factory=LinesTogether)

    async def run(self, own: dict[str, Any]) -> Role | None:
        """Load the engine and serve. Returns the role to serve in next. `own`: this worker's description."""
        config = self.config
        await self.checks.before_loading()
        engine = await self.process.load(self.runtime.instance_id % 1021)
        model = served_model(config, engine)
        # TensorRT-LLM does not report what DEFAULT means there; `transceiver` resolves it.
        transport = None if config.engine_spec.is_tensorrt_llm else engine.kv_pairing
        own = with_engine(
            own, engine.facts, model.block_size, engine.ctx_info_endpoint, engine.ctx_dp_rank, transport
        )
        leaving = Leaving(self.runtime, self.drain, engine, self.queue, config.drain_seconds)
        stopping = asyncio.create_task(leaving.leave_when(self.process.told_to_stop), name="stopping")
        try:
            async with leave_when_dead(engine, leaving, _health_times(config), config.stall_seconds):
                await self._serve(engine, own, model, leaving)
        finally:
            stopping.cancel()
            await asyncio.to_thread(self.tracer.close)
        if self.runtime.was_dropped:
            log.warning("discovery has dropped this worker: it enters again, with the engine as it is")
            # Until its runtime reaches etcd, Dynamo holds the interpreter: no signal is heard, and no health checked.
            os.environ.setdefault("ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "1")
            return config.role
        return leaving.flips_to

    async def _serve(self, engine: Engine, own: dict[str, Any], model: ServedModel, leaving: Leaving) -> None:
        config, runtime = self.config, self.runtime
        readers = await self.process.read(model.block_size)
        self.reporter.tell("looking for the other stage")
        occupancies = await self._occupancies()
        if self.turn.live is None:
            live = LiveState.of(config, model.block_size, occupancies)
        else:
            live = self.turn.live.in_another_role(config, occupancies)
        self.turn.live = live
        own = own | {"strategy": live.strategy.value}
        if not await self.checks.before_listing(own):
            return
        peers = await self._open_peers(own, live)
        registration = DynamoRegistration(runtime, model, readers, tells_peers=config.tells_peers)
        others = partial(self._others, own)
        state = StageState(
            config, own, live, peers, registration, self.verifier, others, leaving.flip, leaving.finish
        )
        generate = self._request_path(engine, peers, live, state)
        load_seconds = self.process.load_seconds
        publishers = await create_publishers(config, runtime, engine, model, live, load_seconds, readers)
        try:
            for publisher in publishers:
                await publisher.start()
            async with _watching(config, live, state) as watchers:
                serving = runtime.serve(
                    generate,
                    lambda: state.describe() | self.checks.described() | {"ready": self.turn.is_ready},
                    state.handle_command,
                    engine.longest_prompt,
                    partial(probe, engine),
                )
                await _serve_and(self._register(own, state, generate, watchers, leaving), serving, runtime)
        finally:
            self.lines.flush()
            for publisher in publishers:
                await publisher.stop()

    async def _others(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """The descriptions of all other workers of this one's model."""
        by_id = {each.instance_id: each.description for each in await self.runtime.list_instances()}
        by_id.pop(self.runtime.instance_id, None)
        return [each for each in by_id.values() if each.get("model") == own["model"]]

    async def _occupancies(self) -> OtherOccupancy:
        """How full the workers of the other role are."""
        endpoint_id = self.config.peer_endpoint_id
        if endpoint_id is None or not self.config.reads_occupancy:
            return lambda: None
        return StageOccupancy(await self.runtime.stage(endpoint_id)).now

    async def _open_peers(self, own: dict[str, Any], live: LiveState) -> Peers:
        """The workers of the other role that this one can serve with."""
        config, endpoint_id = self.config, self.config.peer_endpoint_id
        if endpoint_id is None:
            return peers_of(config, NoStage(), live.breaker)
        in_flight = InFlight()
        selection = await _selection(config, endpoint_id, self.runtime, own["block_size"], in_flight)
        return peers_of(config, selection, live.breaker, in_flight, partial(require_callable, own))

    def _request_path(self, engine: Engine, peers: Peers, live: LiveState, state: StageState) -> Generate:
        config = self.config
        log = RequestLog(
            lambda: _worker_label(config.role, live.strategy.value), live.sinks, self.tracer, self.lines.write
        )
        counts = RunCounts(Admission(live.thresholds, live.queued), log, self.drain, state.whole_requests)
        return build_generate(config, engine, peers, live, self.queue, self.runtime.instance_id, counts)

    async def _register(
        self,
        own: dict[str, Any],
        state: StageState,
        generate: Generate,
        watchers: list[asyncio.Task[None]],
        leaving: Leaving,
    ) -> None:
        config, runtime = self.config, self.runtime
        self.reporter.tell("registering")
        await state.apply(await self.checks.before_registering(own))
        await self.queue.start(generate, runtime.instance_id, runtime.endpoint_for_frontends)
        watchers.append(asyncio.create_task(_report_load(self.reporter, self.drain, leaving), name="load"))
        self.turn.is_ready = True
        # Requests of the role before refer to its sockets in circles, and a worker's collector seldom runs by itself.
        gc.collect()
        log.info(
            "worker ready: %s at %s, instance %x; discovery: %s",
            _worker_label(config.role, config.strategy),
            config.endpoint_id,
            runtime.instance_id,
            config.discovery_backend,
        )


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


async def _selection(
    config: WorkerConfig, endpoint_id: str, runtime: Runtime, block_size: int, in_flight: InFlight
) -> Selection:
    overlaps = runtime.overlaps(endpoint_id, block_size)
    if config.calls_second_stage and config.next_router == "kv":
        overlaps.listen()
    selectors: dict[str, Callable[[], Selector]] = {
        "round_robin": RoundRobin,
        "random": Random,
        "least_loaded": lambda: LeastLoaded(in_flight),
        "kv": lambda: BestCached(overlaps, in_flight),
    }
    role = Role.DECODE if config.role is Role.PREFILL else Role.PREFILL
    return Selection(
        await runtime.stage(endpoint_id), selectors[config.next_router](), role.value, runtime.instance_id
    )


async def _serve_and(
    register: Coroutine[Any, Any, None], serve: Coroutine[Any, Any, None], runtime: Runtime
) -> None:
    """Serve and register at once. A failed registration ends the service, and is raised."""
    serving = asyncio.create_task(serve)
    registering = asyncio.create_task(register, name="registration")
    registering.add_done_callback(lambda task: runtime.shutdown() if _failed(task) else None)
    try:
        await serving
    finally:
        registering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await registering


def _failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None


def _tune_garbage_collector() -> None:
    """Exclude the objects that the start has made from garbage collection, and collect less often: requests rarely make
    cycles, and traversing all these objects takes a twentieth of the worker's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)


def _worker_label(role: Role, strategy: str) -> str:
    """A worker's role and strategy, as logs and traces show them."""
    return "agg" if role is Role.AGG else f"{role}/{strategy}"


def _health_times(config: WorkerConfig) -> HealthTimes:
    return HealthTimes.of(
        config.engine_health_check_interval,
        config.engine_health_check_timeout,
        config.engine_health_shutdown_timeout,
    )


def _verifier(config: WorkerConfig, instance_id: int) -> Verifier:
    file = config.admin_key_file
    return Verifier(AdminKey.read(Path(file), flag_of("admin_key_file")) if file else None, instance_id)


def _weights(config: WorkerConfig) -> str:
    """The hash of the model's files, or the name of a model that the engine downloads itself."""
    directory = Path(config.model)
    return fingerprint(directory) if (directory / "config.json").is_file() else config.model


async def _report_load(reporter: Reporter, drain: WorkerDrain, leaving: Leaving) -> None:
    """Report the number of running requests once a second, to the file that `up` reads."""
    while True:
        doing = SERVING
        if drain.has_begun:
            doing = DRAINING if leaving.flips_to is None else f"becoming {leaving.flips_to}:"
        reporter.tell(doing, requests=drain.num_running)
        await asyncio.sleep(_LOAD_SECONDS)


@contextlib.asynccontextmanager
async def _watching(
    config: WorkerConfig, live: LiveState, state: StageState
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Watch the policy file and file discovery inside the block. All tasks in the list, added ones too, end with it."""
    watchers: list[asyncio.Task[None]] = []
    if config.policy_file is not None:
        watching = watch_policy_file(Path(config.policy_file), live)
        watchers.append(asyncio.create_task(watching, name="policy-file"))
    if config.discovery_backend == "file":
        keeping = keep_in_discovery(state.renew, state.return_if_lost)
        watchers.append(asyncio.create_task(keeping, name="discovery"))
    try:
        yield watchers
    finally:
        for watcher in watchers:
            watcher.cancel()
