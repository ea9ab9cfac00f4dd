"""Each row of the table of a worker's life that changes something is reached by the real code: a whole worker in this
process, on the recording engine and Dynamo's own file discovery.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import demo_model
from trtllm_disagg.admin.commands import ADMIN_ROUTE, Command, Flip, Leave, Signer
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.config.args import add_worker_arguments
from trtllm_disagg.dynamo_runtime.listing import ServedEndpoints
from trtllm_disagg.dynamo_runtime.registration import Registration
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.errors import ConfigError, EngineLostError, WorkerLeavingError
from trtllm_disagg.handlers.drain import WorkerDrain
from trtllm_disagg.prefill_queue import WorkerQueue
from trtllm_disagg.worker import process
from trtllm_disagg.worker.life import TABLE, Action, Event, Life, State
from trtllm_disagg.worker.process import WorkerProcess
from trtllm_disagg.worker.startup_checks import StartupChecks
from trtllm_disagg.worker.worker import run_worker
from trtllm_disagg.worker.worker_command import read_settings

pytestmark = pytest.mark.process

SECONDS = 30.0
Row = tuple[State, Event]

#: Rows that cannot be reached from outside.
CANNOT: dict[Row, str] = {
    (State.UNLISTED, Event.FAILED): "each step of leaving catches what fails of it: only a bug raises there",
    (State.DRAINING, Event.FAILED): "as above",
}


@dataclass
class Gate:
    """Stands before a step of the worker until it is opened, and may make the step fail."""

    has_come: asyncio.Event = field(default_factory=asyncio.Event)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    def open(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_go_on.set()


class Rig:
    """One worker, and what happened in its life."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path) -> None:
        self.reached: set[Row] = set()
        self.processes: list[WorkerProcess] = []
        self.lives: list[Life] = []
        self.runtimes: list[Runtime] = []
        self.drains: list[WorkerDrain] = []
        #: At the system port.
        self.routes: dict[str, Any] = {}
        self._patch = patch
        self._files = directory / "discovery"
        self._key = AdminKey.create(directory / "key")
        self._keep(WorkerProcess, self.processes)
        self._keep(Life, self.lives)
        self._keep(Runtime, self.runtimes)
        self._keep(WorkerDrain, self.drains)
        happened, register = Life.happened, Runtime.register_engine_route

        def noted(life: Life, event: Event) -> Action:
            self.reached.add((life.state, event))
            return happened(life, event)

        def kept(runtime: Runtime, path: str, route: Any) -> None:
            self.routes[path] = route
            register(runtime, path, route)

        patch.setattr(Life, "happened", noted)
        patch.setattr(Runtime, "register_engine_route", kept)
        patch.setattr(process, "_tune_garbage_collector", lambda: None)
        patch.setenv("DYN_FILE_KV", str(self._files))
        patch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0.2")
        patch.setenv("DYN_SYSTEM_PORT", "0")

    def _keep(self, kind: type, kept: list[Any]) -> None:
        original = kind.__init__  # type: ignore[misc]

        def keeping(made: Any, *args: Any, **kwargs: Any) -> None:
            kept.append(made)
            original(made, *args, **kwargs)

        self._patch.setattr(kind, "__init__", keeping)

    def gate(self, kind: type, method: str, call: int = 1) -> Gate:
        """Before this call of the method."""
        gate, original, calls = Gate(), getattr(kind, method), 0

        async def gated(made: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                gate.has_come.set()
                await gate.may_go_on.wait()
                if gate.error is not None:
                    raise gate.error
            return await original(made, *args, **kwargs)

        self._patch.setattr(kind, method, gated)
        return gate

    @contextlib.asynccontextmanager
    async def runs(self, *flags: str) -> AsyncIterator[asyncio.Task[None]]:
        """A decode worker, alone; its end is awaited with the block."""
        parser = argparse.ArgumentParser()
        add_worker_arguments(parser)
        words = ["--engine", "recording", "--model", str(demo_model())]
        words += ["--admin-key-file", str(self._key_file)]
        words += ["--disaggregation-mode", "decode", "--discovery-backend", "file", "--request-plane", "tcp"]
        settings = read_settings(parser.parse_args([*words, "--event-plane", "zmq", *flags]))
        running = asyncio.create_task(run_worker(*settings))
        async with asyncio.timeout(SECONDS):
            try:
                yield running
                await asyncio.wait({running})
            finally:
                running.cancel()
                await asyncio.wait({running})

    @property
    def _key_file(self) -> Path:
        return self._files.parent / "key"

    @property
    def life(self) -> Life:
        return self.lives[-1]

    async def comes_to(self, state: State) -> None:
        while not self.lives or self.life.state is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def reaches(self, state: State, event: Event) -> None:
        while (state, event) not in self.reached:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    # -- what happens

    async def admin(self, request: dict[str, Any]) -> Any:
        return await self.routes[ADMIN_ROUTE](request)

    async def status(self, path: str = "status") -> tuple[str, int, bool]:
        told = await self.routes[path]({})
        return told["state"], told["requests"], told["safe_to_delete"]

    async def command(self, command: Command) -> dict[str, Any]:
        request = Signer(self._key).request(command, self.runtimes[-1].instance_id)
        answer: dict[str, Any] = await self.admin(request)
        return answer

    async def flips(self) -> None:
        to = "prefill" if (await self.admin({}))["role"] == "decode" else "decode"
        assert await self.command(Flip(to, force=True)) == {"answer": {"warnings": []}}  # type: ignore[arg-type]

    def finishes(self) -> asyncio.Task[dict[str, Any]]:
        return asyncio.create_task(self.command(Leave(SECONDS)))

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def die(self) -> None:
        engine = self.processes[-1].engine
        assert engine is not None
        engine.llm.die()

    def drop(self) -> None:
        """As Dynamo does when a lease in etcd is over."""
        self.runtimes[-1]._dynamo.shutdown()

    def listed(self) -> list[Path]:
        return [*(self._files / "v1" / "instances").glob("*")]

    async def loses_files(self) -> None:
        """As when nothing can be written for 10 s. The worker has looked at them before."""
        await asyncio.sleep(1.5)
        for each in self.listed():
            each.unlink()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    return Rig(monkeypatch, tmp_path)


# -- lives, and the rows of the table that each of them shows


async def flips_and_stops(rig: Rig) -> None:
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        await rig.flips()
        await rig.reaches(State.OVER, Event.NEXT)
        await rig.comes_to(State.SERVING)
        assert (await rig.admin({}))["role"] == "prefill"
        rig.stop()
    await running


async def returns_from_a_role_that_it_cannot_enter(rig: Rig) -> None:
    listing = rig.gate(StartupChecks, "before_listing", call=2)
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        await rig.flips()
        await listing.has_come.wait()
        assert (await rig.admin({}))["state"] == "loading"
        listing.open(ConfigError("it does not fit"))
        await rig.comes_to(State.SERVING)
        assert (await rig.admin({}))["role"] == "decode"
        rig.stop()
    await running


async def stops_while_it_loads(rig: Rig) -> None:
    """It waits for the second stage, and is in no discovery."""
    looking = rig.gate(Runtime, "wait_for_second_stage")
    looking.open()
    async with rig.runs("--on-missing-stage", "fail") as running:
        await looking.has_come.wait()
        rig.stop()
    await running


async def dies_while_it_loads(rig: Rig) -> None:
    listing = rig.gate(StartupChecks, "before_listing")
    async with rig.runs() as running:
        await listing.has_come.wait()
        rig.die()
    with pytest.raises(EngineLostError):
        await running


async def is_lost_and_stops_while_it_registers(rig: Rig) -> None:
    rig.gate(StartupChecks, "before_registering")
    async with rig.runs() as running:
        await rig.comes_to(State.LISTED)
        await rig.loses_files()
        await rig.reaches(State.LISTED, Event.AWAKE)
        rig.stop()
    await running


async def flips_while_it_registers(rig: Rig) -> None:
    rig.gate(StartupChecks, "before_registering")
    async with rig.runs() as running:
        await rig.comes_to(State.LISTED)
        await rig.flips()
        await rig.comes_to(State.SERVING)
        rig.stop()
    await running


async def finishes_while_it_registers(rig: Rig) -> None:
    rig.gate(StartupChecks, "before_registering")
    async with rig.runs() as running:
        await rig.comes_to(State.LISTED)
        assert await rig.finishes() == {"answer": {"requests_left": 0}}
    await running


async def is_dropped_while_it_registers_and_while_it_serves(rig: Rig) -> None:
    rig.gate(StartupChecks, "before_registering")
    async with rig.runs() as running:
        await rig.comes_to(State.LISTED)
        rig.drop()
        await rig.comes_to(State.SERVING)
        rig.drop()
        await rig.reaches(State.SERVING, Event.DROPPED)
        await rig.comes_to(State.SERVING)
        assert len(rig.runtimes) == 3
        rig.stop()
    await running


async def is_dropped_while_it_flips(rig: Rig) -> None:
    """The flip goes on, and not the role before: nothing that ends the lease changes what was commanded."""
    leaving = rig.gate(Registration, "unlist")
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        await rig.flips()
        await leaving.has_come.wait()
        rig.drop()
        leaving.open()
        await rig.reaches(State.OVER, Event.NEXT)
        await rig.comes_to(State.SERVING)
        assert (await rig.admin({}))["role"] == "prefill"
        rig.stop()
    await running


async def dies_while_it_registers(rig: Rig) -> None:
    rig.gate(StartupChecks, "before_registering")
    async with rig.runs() as running:
        await rig.comes_to(State.LISTED)
        rig.die()
    with pytest.raises(EngineLostError):
        await running


async def fails_while_it_registers(rig: Rig) -> None:
    registering = rig.gate(StartupChecks, "before_registering")
    async with rig.runs() as running:
        await rig.comes_to(State.LISTED)
        registering.open(ConfigError("it does not fit"))
    with pytest.raises(ConfigError, match="it does not fit"):
        await running


async def fails_while_it_serves(rig: Rig) -> None:
    serving = rig.gate(ServedEndpoints, "until_ended")
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        serving.open(ConnectionError("reset"))
    with pytest.raises(ConnectionError):
        await running


async def loses_its_files_and_dies_while_it_serves(rig: Rig) -> None:
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        await rig.loses_files()
        await rig.reaches(State.SERVING, Event.AWAKE)
        rig.die()
    with pytest.raises(EngineLostError):
        await running


async def is_told_to_finish_and_to_stop_while_it_leaves(rig: Rig) -> None:
    """The order to stop prevails over a flip at every moment, and so does a finish."""
    leaving, request = rig.gate(Registration, "unlist"), None
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        request = rig.drains[-1].enter()
        await rig.flips()
        finished = [rig.finishes()]
        await rig.reaches(State.UNLISTED, Event.FINISH)
        rig.stop()
        await rig.reaches(State.UNLISTED, Event.STOP)
        await leaving.has_come.wait()
        leaving.open()
        await rig.comes_to(State.DRAINING)
        finished.append(rig.finishes())
        await rig.reaches(State.DRAINING, Event.FINISH)
        rig.stop()
        await rig.reaches(State.DRAINING, Event.STOP)
        rig.drains[-1].leave(request)
        assert await asyncio.gather(*finished) == [{"answer": {"requests_left": 0}}] * 2
    await running
    assert len(rig.runtimes) == 1


async def finishes_and_dies_while_it_leaves(rig: Rig) -> None:
    leaving = rig.gate(Registration, "unlist")
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        finished = rig.finishes()
        await leaving.has_come.wait()
        rig.die()
        await rig.reaches(State.UNLISTED, Event.DIED)
        leaving.open()
        await finished
    with pytest.raises(EngineLostError):
        await running


async def dies_while_it_drains(rig: Rig) -> None:
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        request = rig.drains[-1].enter()
        rig.stop()
        await rig.comes_to(State.DRAINING)
        rig.die()
        await rig.reaches(State.DRAINING, Event.DIED)
        rig.drains[-1].leave(request)
    with pytest.raises(EngineLostError):
        await running


async def hands_requests_back_and_is_told_to_stop_when_it_is_over(rig: Rig) -> None:
    ending = rig.gate(WorkerQueue, "aclose")
    async with rig.runs("--drain-seconds", "0") as running:
        await rig.comes_to(State.SERVING)
        request = rig.drains[-1].enter()
        await rig.flips()
        await rig.comes_to(State.OVER)
        rig.drains[-1].leave(request)
        await ending.has_come.wait()
        rig.stop()
        await rig.reaches(State.OVER, Event.STOP)
        ending.open()
    await running
    assert len(rig.runtimes) == 1


async def dies_when_it_is_over(rig: Rig) -> None:
    ending = rig.gate(WorkerQueue, "aclose")
    async with rig.runs() as running:
        await rig.comes_to(State.SERVING)
        await rig.flips()
        await ending.has_come.wait()
        rig.die()
        await rig.reaches(State.OVER, Event.DIED)
        ending.open()
    with pytest.raises(EngineLostError):
        await running


async def pauses_for_its_requests_and_resumes(rig: Rig) -> None:
    async with rig.runs("--admin-routes", "--drain-seconds", "0.1") as running:
        await rig.comes_to(State.SERVING)
        request = rig.drains[-1].enter()
        assert await rig.status("drain") == ("unlisted", 1, False)
        await rig.comes_to(State.DRAINING)
        assert rig.listed() == []
        while not (waits_for := (await rig.routes["status"]({}))["waits_for"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert waits_for.startswith("1 requests still run after 0.1 s")
        with pytest.raises(WorkerLeavingError, match="not drained by a pause: it is draining"):
            await rig.status("resume")
        assert await rig.status("drain") == ("draining", 1, False)
        rig.drains[-1].leave(request)
        while not (await rig.status())[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await rig.status() == ("drained", 0, True)
        await rig.status("resume")
        await rig.reaches(State.OVER, Event.NEXT)
        await rig.comes_to(State.SERVING)
        assert rig.listed() != []
        rig.stop()
    await running


async def pauses_while_it_registers_and_is_told_to_stop(rig: Rig) -> None:
    rig.gate(StartupChecks, "before_registering")
    async with rig.runs("--admin-routes") as running:
        await rig.comes_to(State.LISTED)
        await rig.status("drain")
        await rig.comes_to(State.DRAINING)
        rig.stop()
    await running
    assert len(rig.runtimes) == 1


LIVES: dict[Any, set[Row]] = {
    pauses_for_its_requests_and_resumes: {(State.SERVING, Event.PAUSE), (State.DRAINING, Event.RESUME)},
    pauses_while_it_registers_and_is_told_to_stop: {(State.LISTED, Event.PAUSE)},
    flips_and_stops: {
        (State.LOADING, Event.LOADED),
        (State.LISTED, Event.PAIRED),
        (State.SERVING, Event.FLIP),
        (State.UNLISTED, Event.UNCALLED),
        (State.DRAINING, Event.DRAINED),
        (State.OVER, Event.NEXT),
        (State.SERVING, Event.STOP),
    },
    is_dropped_while_it_flips: {(State.OVER, Event.NEXT)},
    returns_from_a_role_that_it_cannot_enter: {(State.LOADING, Event.FAILED)},
    stops_while_it_loads: {(State.LOADING, Event.STOP)},
    dies_while_it_loads: {(State.LOADING, Event.DIED)},
    is_lost_and_stops_while_it_registers: {(State.LISTED, Event.AWAKE), (State.LISTED, Event.STOP)},
    flips_while_it_registers: {(State.LISTED, Event.FLIP)},
    finishes_while_it_registers: {(State.LISTED, Event.FINISH)},
    is_dropped_while_it_registers_and_while_it_serves: {
        (State.LISTED, Event.DROPPED),
        (State.SERVING, Event.DROPPED),
    },
    dies_while_it_registers: {(State.LISTED, Event.DIED)},
    fails_while_it_registers: {(State.LISTED, Event.FAILED)},
    fails_while_it_serves: {(State.SERVING, Event.FAILED)},
    loses_its_files_and_dies_while_it_serves: {(State.SERVING, Event.AWAKE), (State.SERVING, Event.DIED)},
    is_told_to_finish_and_to_stop_while_it_leaves: {
        (state, event) for state in (State.UNLISTED, State.DRAINING) for event in (Event.FINISH, Event.STOP)
    },
    finishes_and_dies_while_it_leaves: {(State.SERVING, Event.FINISH), (State.UNLISTED, Event.DIED)},
    dies_while_it_drains: {(State.DRAINING, Event.DIED)},
    hands_requests_back_and_is_told_to_stop_when_it_is_over: {
        (State.DRAINING, Event.DEADLINE),
        (State.OVER, Event.STOP),
    },
    dies_when_it_is_over: {(State.OVER, Event.DIED)},
}


@pytest.mark.parametrize("one_life", LIVES, ids=lambda one_life: one_life.__name__)
async def test_a_real_worker_reaches(one_life: Any, rig: Rig) -> None:
    await one_life(rig)
    assert LIVES[one_life] <= rig.reached
    assert rig.life.state is State.OVER


def test_no_row_of_the_table_is_without_a_life_that_reaches_it() -> None:
    acts = {row for row, (_, action) in TABLE.items() if action not in (Action.IGNORE, Action.REFUSE)}
    assert set().union(*LIVES.values()) == acts - CANNOT.keys()
