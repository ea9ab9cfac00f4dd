"""Builds every part of a worker in order, from configuration to serving, wired by constructors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trtllm_disagg.admin.commands import Verifier
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.common.model_directory import fingerprint
from trtllm_disagg.common.reports import ACTIVITY_VARIABLE, DRAINING, SERVING, reporter_of
from trtllm_disagg.config.engine_args import dump_config
from trtllm_disagg.config.worker_config import Role, WorkerConfig, flag_of
from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.cards import Cards
from trtllm_disagg.dynamo_runtime.discovery import Clients
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.dynamo_runtime.listing import ServedEndpoints, keep_in_discovery
from trtllm_disagg.dynamo_runtime.metrics import DynamoMetrics
from trtllm_disagg.dynamo_runtime.publishers import Publishing
from trtllm_disagg.dynamo_runtime.registration import Registration
from trtllm_disagg.dynamo_runtime.system_port import require_system_port
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.health import probe
from trtllm_disagg.engine.llm_api import LlmApi, serve_as_rank
from trtllm_disagg.engine.trtllm_version import installed_version
from trtllm_disagg.handlers.admission import Admission
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.handlers.live_state import LiveState, StageOccupancy
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.run import RunCounts
from trtllm_disagg.handlers.selection import SELECTORS, InFlight, NoStage, Selection
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.handlers.trace import LinesTogether, RequestLog
from trtllm_disagg.prefill_queue import WorkerQueue, open_prefill_queue
from trtllm_disagg.tracing.tracer import Tracer, tracer_of
from trtllm_disagg.types import Generate
from trtllm_disagg.worker.control import Control
from trtllm_disagg.worker.flips import RoleSettings, flipped
from trtllm_disagg.worker.leaving import Leaving
from trtllm_disagg.worker.life import Action, Event, State, live
from trtllm_disagg.worker.model_facts import UNKNOWN_MODEL, read_model_facts
from trtllm_disagg.worker.pairing import (
    Fingerprint,
    ModelIdentity,
    describe_worker,
    group_of,
    require_callable,
)
from trtllm_disagg.worker.process import WorkerProcess, served_model, worker_label
from trtllm_disagg.worker.stage_state import StageState
from trtllm_disagg.worker.startup_checks import ModelNameGuard, StartupChecks

log = logging.getLogger(__name__)

_LOAD_SECONDS = 1.0


async def run_worker(config: WorkerConfig, engine_args: dict[str, Any], api: LlmApi) -> None:
    """Serve until stopped. Raises ConfigError before building anything, EngineLostError if the engine dies.

    The start, after the settings (worker_command.py): description, prefill queue, Dynamo's runtime, engine, peers,
    request path, serving, registration. A flip repeats all but the engine.
    """
    reporter = reporter_of(os.environ)
    # On ranks above 0 this call serves the engine until its end, and nothing else runs.
    if serve_as_rank(config.engine, engine_args):
        return
    if config.server_disable_gc:
        gc.disable()
    process = WorkerProcess(
        config,
        engine_args,
        api,
        reporter,
        await asyncio.to_thread(Advertised.of, config, engine_args),
        Clients(config) if config.discovery_backend == "file" else None,
    )
    try:
        await live(process.life, RoleTerm(process, config), process.require_engine)
    finally:
        await process.end()


@dataclass(eq=False)
class RoleTerm:
    """A worker's time in one role."""

    process: WorkerProcess
    config: WorkerConfig
    #: From the previous role term; None in the first.
    live: LiveState | None = None
    #: The instance id in the previous role term.
    flipped_from: str = ""
    #: None until discovery lists this worker.
    leaving: Leaving | None = None
    #: None until the engine is loaded.
    stage: StageState | None = None
    instance: str = ""
    #: Ends with the role term: the runtime, once open.
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    #: This worker's description for others, without what changes while it serves.
    description: dict[str, Any] = field(init=False)
    runtime: Runtime = field(init=False)
    served: ServedEndpoints = field(init=False)
    queue: WorkerQueue = field(init=False)
    checks: StartupChecks = field(init=False)
    tracer: Tracer = field(init=False)
    drain: WorkerDrain = field(init=False)
    lines: LinesTogether = field(init=False)

    @property
    def role(self) -> Role:
        return self.config.role

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[asyncio.Task[None]]:
        """Start the task that opens a runtime, loads what is missing, enters discovery, registers and serves. The
        runtime ends with the block, which raises what the task raises.
        """
        serving = asyncio.create_task(self._run(), name=f"{self.role} term")
        try:
            yield serving
        except BaseException:
            serving.cancel()
            raise
        finally:
            self.ends.close()
            if self.leaving is None:  # not in discovery yet
                serving.cancel()
            await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()

    async def leave(self) -> None:
        """Leave in order (`Leaving`), unless the role term is over."""
        if self.process.life.state is State.UNLISTED and self.leaving is not None:
            await self.leaving.run()

    def following(self, to: Role | None) -> RoleTerm:
        """The next role term, in the role `to`; None: in the same role."""
        config = self.config if to is None else flipped(self.config, to)
        return RoleTerm(self.process, config, self.live, self.instance)

    def again(self, after: RoleTerm) -> RoleTerm:
        """This role term again, after `after` failed."""
        return RoleTerm(self.process, self.config, self.live, after.flipped_from)

    async def _run(self) -> None:
        """Load the engine, enter discovery, register, and serve until the runtime ends."""
        config, process = self.config, self.process
        dump_config(config, process.engine_args)
        identity, description = _describe(config, process.engine_args)
        self.description = description | {
            "flipped_from": self.flipped_from,
            "process": Path(os.environ.get(ACTIVITY_VARIABLE, "")).stem,
        }
        self.drain, self.lines = WorkerDrain(), LinesTogether()
        async with aclosing(await open_prefill_queue(config, group_of(self.description))) as self.queue:
            require_system_port(os.environ)
            runtime = self.runtime = await process.open_runtime(config)
            self.ends.callback(runtime.shutdown)
            self.instance = f"{runtime.instance_id:x}"
            self.served = ServedEndpoints(config, runtime)
            own_endpoint_ids = {config.endpoint_id, config.worker_endpoint_id}
            names = ModelNameGuard(identity, runtime.instance_id, own_endpoint_ids, runtime.list_instances)
            if process.engine is not None:
                names.machine_id = process.engine.machine_id
            self.checks = StartupChecks(config, names, runtime)
            self.tracer = tracer_of(os.environ, worker_label(config.role, config.strategy), self.instance)
            key_file = config.admin_key_file
            key = AdminKey.read(Path(key_file), flag_of("admin_key_file")) if key_file else None
            verifier = Verifier(key, runtime.instance_id)
            self.description["key"] = verifier.key_id
            control = Control(self, verifier)
            runtime.describe = self.describe
            for path, route in control.routes():
                runtime.register_engine_route(path, route)
            try:
                await self.checks.before_loading()
                await self._serve(await process.load(names.machine_id), control)
            finally:
                self.served.release()
                self.lines.flush()
                await asyncio.to_thread(self.tracer.close)

    def describe(self) -> dict[str, Any]:
        """This worker's current description, as JSON."""
        life = self.process.life
        now = {"ready": life.has_served, "state": life.state.value, "becomes": life.becomes or ""}
        of_stage = {} if self.stage is None else self.stage.describe()
        return self.description | of_stage | self.checks.names.described() | now

    async def _serve(self, engine: Engine, control: Control) -> None:
        config, runtime, process = self.config, self.runtime, self.process
        model = served_model(config, engine)
        readers = await process.read(model.block_size)
        # TensorRT-LLM does not report what DEFAULT means; `transceiver` resolves it.
        transport = None if config.engine_spec.is_tensorrt_llm else engine.kv_pairing
        process.reporter.report("looking for the other stage")
        live = self.live = await self._live_state(model.block_size)
        own = self.description = (
            self.description
            | engine.facts.to_json()
            | {
                "strategy": live.strategy.value,
                "block_size": model.block_size,
                "kv_transport": transport,
                "ctx_info_endpoint": engine.ctx_info_endpoint,
                "ctx_dp_rank": engine.ctx_dp_rank,
            }
        )
        await self.checks.before_listing(self.description)
        engine.use_machine_id(self.checks.names.machine_id)
        peers = await self._open_peers(live)
        cards = Cards(config, runtime, process.advertised, model)
        registration = Registration(config, runtime, self.served, cards, readers)
        leaving = Leaving(process.life, registration, self.drain, engine, self.queue, config.drain_seconds)
        stage = self.stage = StageState(config, process.life, live, peers, registration, own["max_seq_len"])
        generate = await self._request_path(engine, peers, live, stage)
        probing = partial(probe, engine)
        longest, images = engine.longest_prompt, config.images is not None
        handler = Handler(generate, self.describe, control.handle, longest, probing, takes_images=images)
        await self.served.answer_with(handler)
        metrics = DynamoMetrics(config, model.num_blocks, model.num_ranks)
        metrics.loaded(process.load_seconds)
        publishing = Publishing(config, runtime, engine, model, live, readers, metrics)
        async with contextlib.AsyncExitStack() as ended:
            for publisher in await publishing.publishers():
                ended.push_async_callback(publisher.stop)
                await publisher.start()
            if config.discovery_backend == "file":
                keeping = keep_in_discovery(stage.renew, partial(stage.renew, only_if_lost=True))
                ended.callback(asyncio.create_task(keeping).cancel)
            if process.life.happened(Event.LOADED) is Action.LIST:
                self.leaving = leaving
                await registration.list_for_peers()
                await self._serve_and_register(stage)

    async def _serve_and_register(self, stage: StageState) -> None:
        """A failed registration ends serving, and is raised."""
        registering = asyncio.create_task(self._register(stage), name="registration")
        registering.add_done_callback(lambda task: self.runtime.shutdown() if _failed(task) else None)
        try:
            await self.served.until_ended()
        finally:
            registering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await registering

    async def _register(self, stage: StageState) -> None:
        """Register, then report the running requests once a second to the file that `up` reads. Never returns."""
        config, runtime, process = self.config, self.runtime, self.process
        life, report = process.life, process.reporter.report
        report("registering")
        strategy = await self.checks.before_registering(self.description)
        assert process.engine is not None
        process.engine.use_machine_id(self.checks.names.machine_id)
        await stage.apply(strategy)
        await self.queue.start(process.engine, runtime.instance_id, runtime.endpoint_for_frontends)
        if life.happened(Event.PAIRED) is Action.READY:
            # Requests of the previous role term hold its sockets in cycles, and the collector seldom runs.
            gc.collect()
            label, where = worker_label(config.role, config.strategy), config.endpoint_id
            ready = "worker ready: %s at %s, instance %s; discovery: %s"
            log.info(ready, label, where, self.instance, config.discovery_backend)
        while True:
            leaving = DRAINING if life.becomes is None else f"becoming {life.becomes}:"
            report(SERVING if life.state is State.SERVING else leaving, requests=self.drain.num_running)
            await asyncio.sleep(_LOAD_SECONDS)

    async def others(self) -> list[dict[str, Any]]:
        """The descriptions of all other workers of this model."""
        by_id = {each.instance_id: each.description for each in await self.runtime.list_instances()}
        by_id.pop(self.runtime.instance_id, None)
        return [each for each in by_id.values() if each.get("model") == self.description["model"]]

    async def _live_state(self, block_size: int) -> LiveState:
        """The live state, continued from the previous role term where possible."""
        config, before = self.config, self.live
        read = config.peer_endpoint_id if config.reads_occupancy else None
        other_occupancy = StageOccupancy(await self.runtime.stage(read)).now if read else lambda: None
        if before is None:
            return LiveState.of(config, block_size, other_occupancy)
        return before.in_another_role(config, other_occupancy)

    async def _open_peers(self, live: LiveState) -> Peers:
        """The peers that this worker can serve with."""
        config, endpoint_id, own = self.config, self.config.peer_endpoint_id, self.description
        if endpoint_id is None:
            return peers_of(config, NoStage(), live.breaker)
        overlaps, in_flight = self.runtime.clients.overlaps(endpoint_id, own["block_size"]), InFlight()
        if config.calls_second_stage and config.next_router == "kv":
            overlaps.listen()
        role = Role.DECODE if config.role is Role.PREFILL else Role.PREFILL
        selector = SELECTORS[config.next_router](in_flight, overlaps)
        stage = await self.runtime.stage(endpoint_id)
        selection = Selection(stage, selector, role.value, self.runtime.instance_id)
        return peers_of(config, selection, live.breaker, in_flight, partial(require_callable, own))

    async def _request_path(
        self, engine: Engine, peers: Peers, live: LiveState, stage: StageState
    ) -> Generate:
        config, queue = self.config, await self.queue.for_requests(peers, self.runtime)
        log = RequestLog(
            lambda: worker_label(config.role, live.strategy.value), live.sinks, self.tracer, self.lines.write
        )
        counts = RunCounts(Admission(live.thresholds, live.queued), log, self.drain, stage.client_requests)
        return build_generate(config, engine, peers, live, queue, self.runtime.instance_id, counts)


def _describe(config: WorkerConfig, engine_args: dict[str, Any]) -> tuple[ModelIdentity, dict[str, Any]]:
    """This worker's model, and its description for others."""
    facts = read_model_facts(config.model)
    shares = facts if config.engine_spec.is_tensorrt_llm else UNKNOWN_MODEL
    # Of a model that the engine downloads, only the name is known.
    is_here = (Path(config.model) / "config.json").is_file()
    weights = fingerprint(Path(config.model)) if is_here else config.model
    identity = ModelIdentity(
        config.model_name,
        config.model,
        weights,
        shares.layout,
        shares.precision,
        config.role.value,
        config.may_switch,
    )
    settings = Fingerprint.of(
        config.engine, engine_args, config.kv_block_size, facts, installed_version(), os.environ
    )
    of_role = RoleSettings.of(engine_args, os.environ).to_json()
    return identity, describe_worker(config, settings, identity) | of_role


def _failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None
