"""The supervisor ends what its processes leave behind, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.deployments import wait_until
from trtllm_disagg.deployment.backoff import Backoff
from trtllm_disagg.deployment.managed_process import ManagedProcess
from trtllm_disagg.deployment.plan import DeploymentConfig, ProcessSpec
from trtllm_disagg.deployment.run_dir import RunDir
from trtllm_disagg.deployment.status import Status
from trtllm_disagg.deployment.supervisor import Supervisor
from trtllm_disagg.processes.proc_stat import birth

#: A worker whose child has a session of its own, and is in a file before the worker is ready.
WITH_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""
SECONDS = 30.0


@asynccontextmanager
async def supervising(directory: Path, status: Status, **settings: object) -> AsyncIterator[Supervisor]:
    run_dir = RunDir.claim(directory / "run")
    config = DeploymentConfig("decode_first", "m", "m", run_dir.path, **settings)  # type: ignore[arg-type]
    supervisor = Supervisor(config, [], run_dir, status)
    try:
        yield supervisor
    finally:
        await supervisor.kill()


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
    class Notes(Status):
        restarting = asyncio.Event()

        def note(self, text: str) -> None:
            if "it starts again" in text:
                self.restarting.set()

    status = Notes()
    async with supervising(tmp_path, status, backoff=Backoff(first=600.0, most=600.0)) as supervisor:
        watching = asyncio.create_task(supervisor.watch())
        worker = await supervisor.add(with_child(tmp_path / "child"))
        child = await pid_in(tmp_path / "child")

        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(status.restarting.wait(), SECONDS)

        assert not birth(child)
        watching.cancel()


async def test_descendants_are_killed_although_each_report_fails(tmp_path: Path) -> None:
    class Broken(Status):
        is_broken = False

        def changed(self, process: ManagedProcess) -> None:
            if self.is_broken:
                raise RuntimeError("cannot be shown")

    status = Broken()
    async with supervising(tmp_path, status) as supervisor:
        await supervisor.add(with_child(tmp_path / "child"))
        child = os.pidfd_open(await pid_in(tmp_path / "child"))
        status.is_broken = True
    await is_gone(child)
