"""The supervisor ends what its processes leave behind, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.commanded_up import tell
from tests.support.deployments import wait_until
from trtllm_disagg.common.machine import birth
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.brokers import EventBroker
from trtllm_disagg.tools.up.command_socket import serving_commands
from trtllm_disagg.tools.up.commands import Scale
from trtllm_disagg.tools.up.gpus import GpuNeeds, Gpus
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.orphan_reaper import PROCESS_VARIABLE, kill_marked
from trtllm_disagg.tools.up.plan import Backoff, DeploymentConfig, ProcessSpec, RunDirInUseError
from trtllm_disagg.tools.up.run_dir import RunDir, read_processes
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.supervisor import Supervisor

#: A worker with a child in a session of its own, which is in a file before the worker is ready.
WITH_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""
IDLE = (sys.executable, "-S", "-c", "import signal; signal.pause()")
SUPERVISOR = "trtllm_disagg.tools.up.supervisor"
#: Larger than any pid.
NO_PID = 2**22 + 1
SECONDS = 30.0


@asynccontextmanager
async def supervising(
    directory: Path, status: Status, kill_seconds: float = SECONDS, **settings: object
) -> AsyncIterator[Supervisor]:
    run_dir = RunDir.claim(directory / "run")
    config = DeploymentConfig("decode_first", "m", "m", run_dir.path, **settings)  # type: ignore[arg-type]
    supervisor = Supervisor(config, [], run_dir, status, kill_seconds=kill_seconds)
    try:
        yield supervisor
    finally:
        await supervisor.kill()


async def added(supervisor: Supervisor, spec: ProcessSpec) -> ManagedProcess:
    worker = supervisor.add(spec)
    await asyncio.wait_for(worker.was_ready.wait(), SECONDS)
    return worker


async def pid_in(file: Path) -> int:
    """The pid in a file, when it is there."""
    await asyncio.to_thread(wait_until, file.exists, f"{file} is there", SECONDS)
    return int(await asyncio.to_thread(file.read_text))


async def is_gone(descriptor: int) -> None:
    """Wait for the end of the process behind `os.pidfd_open`."""
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), SECONDS)
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def with_child(file: Path) -> ProcessSpec:
    return ProcessSpec("decode-0", "decode", (sys.executable, "-S", "-c", WITH_CHILD, str(file)))


async def test_children_of_a_dead_worker_in_other_sessions_are_gone_before_its_next_start(
    tmp_path: Path,
) -> None:
    class Starts(Status):
        child = 0
        child_lives: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def changed(self, process: ManagedProcess) -> None:
            if process.state == "starting" and process.restarts == 1:
                self.child_lives.set_result(bool(birth(self.child)))

    status = Starts()
    async with supervising(tmp_path, status, backoff=Backoff(first=0.0)) as supervisor:
        watching = asyncio.create_task(supervisor.watch())
        worker = await added(supervisor, with_child(tmp_path / "child"))
        status.child = await pid_in(tmp_path / "child")

        os.kill(worker.pid, signal.SIGKILL)

        assert not await asyncio.wait_for(status.child_lives, SECONDS)
        watching.cancel()


class EndlessSweep:
    """Stands in for `kill_marked`: while `is_endless`, one descendant of each process survives SIGKILL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_endless = False
        self.began = threading.Event()
        monkeypatch.setattr("trtllm_disagg.tools.up.managed_process.kill_marked", self._kill_marked)

    def _kill_marked(self, mark: str, variable: str) -> list[int]:
        survivor = [NO_PID] if self.is_endless and variable == PROCESS_VARIABLE else []
        if survivor:
            self.began.set()
        return [*kill_marked(mark, variable), *survivor]


async def says_nothing(port: int) -> None:
    pass


async def always_ready(spec: ProcessSpec, config: DeploymentConfig) -> bool:
    return True


async def test_dead_worker_counts_and_keeps_its_gpus_while_its_descendants_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = EndlessSweep(monkeypatch)
    monkeypatch.setattr(f"{SUPERVISOR}.is_ready", always_ready)
    monkeypatch.setattr(f"{SUPERVISOR}.described", says_nothing)
    gpus = Gpus({"prefill": ("0",)}, {"prefill": GpuNeeds(1, 0.9, 60.0)})
    async with supervising(tmp_path, Status(), worker_command=IDLE, gpus=gpus) as supervisor:
        watching = asyncio.create_task(supervisor.watch())
        async with serving_commands(supervisor):
            await tell(supervisor, Scale({"prefill": 1}))
            sweep.is_endless = True
            os.kill(supervisor.processes[0].pid, signal.SIGKILL)
            assert await asyncio.to_thread(sweep.began.wait, SECONDS)

            (record,) = read_processes(tmp_path / "run")
            assert record.state == "restarting"
            with pytest.raises(ConfigError, match="--gpus"):
                await tell(supervisor, Scale({"prefill": 2}))
            sweep.is_endless = False
        watching.cancel()


async def test_worker_that_does_not_start_again_keeps_its_gpus_while_its_descendants_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = EndlessSweep(monkeypatch)
    monkeypatch.setattr(f"{SUPERVISOR}.is_ready", always_ready)
    async with supervising(tmp_path, Status(), restart=False) as supervisor:
        worker = await added(supervisor, ProcessSpec("decode-0", "decode", IDLE))
        sweep.is_endless = True
        os.kill(worker.pid, signal.SIGKILL)
        assert await asyncio.to_thread(sweep.began.wait, SECONDS)
        assert (worker.state, worker.holds_gpus) == ("exited", True)
        sweep.is_endless = False
        await supervisor.over([worker])
        assert not worker.holds_gpus


async def test_worker_dies_once_although_the_sweep_of_its_late_start_outlasts_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(Status):
        starts = 0
        reports = ""
        is_back = asyncio.Event()

        def changed(self, process: ManagedProcess) -> None:
            self.starts += process.state == "starting"

        def note(self, text: str) -> None:
            self.reports += text
            if "is back" in text:
                self.is_back.set()

    async def all_but_the_second_start(spec: ProcessSpec, config: DeploymentConfig) -> bool:
        return status.starts != 2

    status = Notes()
    sweep = EndlessSweep(monkeypatch)
    monkeypatch.setattr(f"{SUPERVISOR}.is_ready", all_but_the_second_start)
    backoff = Backoff(first=1.0, max_delay=1.0)
    async with supervising(tmp_path, status, 0.3, startup_timeout=0.5, backoff=backoff) as supervisor:
        watching = asyncio.create_task(supervisor.watch())
        worker = await added(supervisor, ProcessSpec("decode-0", "decode", IDLE))
        sweep.is_endless = True
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(status.is_back.wait(), SECONDS)
        # A second death would start the worker once more, beside the one that is back.
        assert status.reports.count("decode-0 died") == 1
        assert status.starts == 3
        sweep.is_endless = False
        watching.cancel()


async def test_worker_that_sigkill_does_not_end_is_named_and_fails_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(Status):
        text = ""

        def note(self, text: str) -> None:
            self.text += text

    status = Notes()
    monkeypatch.setattr(f"{SUPERVISOR}.is_ready", always_ready)
    async with supervising(tmp_path, status, 0.1, stop_timeout=0.1) as supervisor:
        worker = await added(supervisor, ProcessSpec("decode-0", "decode", IDLE))
        # A process that hangs while it exits: it has no environment any more in which a mark could be.
        monkeypatch.setattr("trtllm_disagg.tools.up.managed_process.kill_marked", lambda mark, variable: [])
        monkeypatch.setattr(worker, "terminate", lambda: None)
        kill = worker.kill
        monkeypatch.setattr(worker, "kill", lambda: None)
        try:
            assert not await supervisor.drain()
            assert f"pid {worker.pid}" in status.text
        finally:
            kill()
            await supervisor.over([worker])


async def test_run_directory_is_in_use_until_the_sockets_in_it_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(broker: EventBroker) -> None:
        with pytest.raises(RunDirInUseError):
            RunDir.claim(tmp_path / "run")
        asked.append(broker)

    asked: list[EventBroker] = []
    monkeypatch.setattr(EventBroker, "close", refused)
    async with supervising(tmp_path, Status()):
        pass
    assert asked
    RunDir.claim(tmp_path / "run").release()


async def test_descendants_are_killed_although_each_report_fails(tmp_path: Path) -> None:
    class Broken(Status):
        is_broken = False

        def changed(self, process: ManagedProcess) -> None:
            if self.is_broken:
                raise RuntimeError("cannot be shown")

    status = Broken()
    async with supervising(tmp_path, status) as supervisor:
        await added(supervisor, with_child(tmp_path / "child"))
        child = os.pidfd_open(await pid_in(tmp_path / "child"))
        status.is_broken = True
    await is_gone(child)
