"""One worker, from its configuration to serving: every part of it is built here, in order, and wired by constructor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_disagg.admin.commands import Verifier
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.config.engine_args import dump_config
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.kv_events import EventSources
from trtllm_disagg.dynamo_runtime.publishers import create_publishers
from trtllm_disagg.dynamo_runtime.shutdown import Leaving, keep_in_discovery
from trtllm_disagg.dynamo_runtime.system_port import require_system_port
from trtllm_disagg.dynamo_runtime.worker_endpoint import DynamoRegistration, Runtime, ServedModel
from trtllm_disagg.engine.capabilities import block_size_of
from trtllm_disagg.engine.daemon_thread import in_daemon_thread
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import EngineHealth, HealthTimes, close, probe, until_stalled
from trtllm_disagg.engine.llm_api import LlmApi, serve_as_rank
from trtllm_disagg.engine.rank_placement import Affinity
from trtllm_disagg.engine.trtllm_version import installed_version
from trtllm_disagg.errors import EngineLostError
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
from trtllm_disagg.processes.reports import DRAINING, SERVING, Reporter, reporter_of
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
from trtllm_disagg.worker.stage_state import StageState
from trtllm_disagg.worker.startup_checks import ModelNameGuard, StartupChecks

log = logging.getLogger(__name__)

#: Thresholds of generations 0, 1 and 2 of the garbage collector; Python's defaults are 700, 10, 10.
_COLLECTOR_THRESHOLDS = 20_000, 20, 20
_LOAD_SECONDS = 1.0


async def run_worker(config: WorkerConfig, engine_args: dict[str, Any], api: LlmApi) -> None:
    """Serve until told to stop. Raises ConfigError before anything is built, EngineLostError when the engine dies.

    The start, in order, after the settings (worker_command.py): this worker's description, the prefill queue, Dynamo's
    runtime, the engine, the client of the peers, the request path, serving, registration. `StartupChecks` compares it
    with other workers before the engine loads, before this worker enters discovery, and before it registers.
    """
    reporter = reporter_of(os.environ)
    # On a rank other than 0 this call serves the engine until its end, and nothing else runs there.
    if serve_as_rank(config.engine, engine_args):
        return
    dump_config(config, engine_args)
    if config.server_disable_gc:
        gc.disable()
    advertised = await asyncio.to_thread(Advertised.of, config, engine_args)
    identity, own = _describe(config, engine_args)
    async with aclosing(await open_prefill_queue(config, kind_of(own))) as queue:
        require_system_port(os.environ)
        runtime = Runtime(config, advertised)
        own_endpoint_ids = {config.endpoint_id, config.worker_endpoint_id}
        names = ModelNameGuard(identity, runtime.instance_id, own_endpoint_ids, runtime.list_instances)
        worker = _Worker(
            config,
            runtime,
            queue,
            StartupChecks(config, names, runtime),
            _verifier(config, runtime.instance_id),
            reporter,
            tracer_of(os.environ, _worker_label(config.role, config.strategy), f"{runtime.instance_id:x}"),
        )
        await worker.run(api, engine_args, own)


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
    return identity, describe_worker(config, fingerprint, identity)


@dataclass(frozen=True, slots=True)
class _Worker:
    """All parts of a worker but its engine, which is loaded only after everything else has been checked."""

    config: WorkerConfig
    runtime: Runtime
    queue: PrefillQueue
    checks: StartupChecks
    verifier: Verifier
    reporter: Reporter
    tracer: Tracer
    drain: WorkerDrain = field(default_factory=WorkerDrain)
    lines: LinesTogether = field(default_factory=LinesTogether)

    async def run(self, api: LlmApi, engine_args: dict[str, Any], own: dict[str, Any]) -> None:
        """Load the engine, serve, and close it. `own`: this worker's description."""
        config = self.config
        await self.checks.before_loading()
        log.info(
            "loading %s on the %s engine as %s",
            config.model,
            config.engine,
            _worker_label(config.role, config.strategy),
        )
        self.reporter.tell("starting the engine")
        began = time.monotonic()
        machine_id = self.runtime.instance_id % 1021
        by_router = config.conversation_affinity_dp_rank_source == "dynamo"
        affinity = Affinity(config.conversation_affinity, by_router=by_router)
        load = partial(Engine.open, api, engine_args, machine_id, affinity)
        engine = await in_daemon_thread(load, "engine-load")
        load_seconds = time.monotonic() - began
        _tune_garbage_collector()
        try:
            for missing in engine.capabilities.missing():
                log.info("the engine cannot %s", missing)
            model = served_model(config, engine)
            # TensorRT-LLM does not report what DEFAULT means there; `transceiver` resolves it.
            transport = None if config.engine_spec.is_tensorrt_llm else engine.kv_transport
            own = with_engine(
                own, engine.facts, model.block_size, engine.ctx_info_endpoint, engine.ctx_dp_rank, transport
            )
            leaving = Leaving(self.runtime, self.drain, engine, self.queue, config.drain_seconds)
            leaving.leave_on_signals()
            async with leave_when_dead(engine, leaving, _health_times(config), config.stall_seconds):
                await self._serve(engine, own, model, load_seconds, leaving)
        finally:
            await asyncio.to_thread(self.tracer.close)
            self.reporter.tell("ending the engine")
            if not await close(engine, _health_times(config)):
                # Raised even while another error is: TensorRT-LLM's exit handler would wait without a limit.
                raise EngineLostError(
                    "the engine did not shut down in time (--engine-health-shutdown-timeout)"
                )

    async def _serve(
        self, engine: Engine, own: dict[str, Any], model: ServedModel, load_seconds: float, leaving: Leaving
    ) -> None:
        config, runtime = self.config, self.runtime
        self.reporter.tell("looking for the other stage")
        if not await self.checks.before_listing(own):
            return
        live = LiveState.of(config, model.block_size, await self._occupancies())
        peers = await self._open_peers(own, live)
        sources = EventSources(may_be_dropped=config.discovery_backend == "file")
        registration = DynamoRegistration(runtime, model, sources, tells_peers=config.tells_peers)
        state = StageState(config, own, live, peers, registration, self.verifier, leaving.finish)
        generate = self._request_path(engine, peers, live, state)
        publishers = await create_publishers(config, runtime, engine, model, live, load_seconds, sources)
        for publisher in publishers:
            await publisher.start()
        try:
            async with _watching(config, live, state) as watchers:
                serving = runtime.serve(
                    generate,
                    lambda: state.describe() | self.checks.described(),
                    state.handle_command,
                    engine.longest_prompt,
                    partial(probe, engine),
                )
                await _serve_and(self._register(own, state, generate, watchers), serving, runtime)
        finally:
            self.lines.flush()
            for publisher in publishers:
                await publisher.stop()

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
    ) -> None:
        config, runtime = self.config, self.runtime
        self.reporter.tell("registering")
        await state.apply(await self.checks.before_registering(own))
        await self.queue.start(generate, runtime.instance_id, runtime.endpoint_for_frontends)
        watchers.append(asyncio.create_task(_report_load(self.reporter, self.drain), name="load"))
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


async def _report_load(reporter: Reporter, drain: WorkerDrain) -> None:
    """Report the number of running requests once a second, to the file that `up` reads."""
    while True:
        reporter.tell(DRAINING if drain.has_begun else SERVING, requests=drain.num_running)
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


async def _watch_for_stalls(engine: Engine, health: EngineHealth, seconds: float) -> None:
    if seconds:
        reason = await until_stalled(engine, seconds)
        log.error("the engine is stalled: %s", reason)
        health.declare_dead(reason)


@contextlib.asynccontextmanager
async def leave_when_dead(
    engine: Engine, leaving: Leaving, times: HealthTimes, stall_seconds: float
) -> AsyncIterator[None]:
    """Leave the deployment when the engine has died. EngineLostError ends the block then, whatever else has failed."""
    health = EngineHealth(engine, lambda reason: leaving.leave("its engine died"), times)
    health.start()
    stalls = asyncio.create_task(_watch_for_stalls(engine, health, stall_seconds), name="stalls")
    try:
        yield
    except Exception as error:
        if engine.death is None:
            raise
        log.info("a step of this worker failed after its engine's death: %s", error)
    finally:
        stalls.cancel()
        health.stop()
    if engine.death is not None:
        raise EngineLostError(f"the engine died: {engine.death}")
