"""`up` with small stand-ins for frontend and workers: it loads, reports, drains, and leaves nothing."""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import trtllm_disagg
from trtllm_disagg.deployment import (
    DeploymentConfig,
    DeploymentFailedError,
    RunDirInUseError,
    deployment_in_background,
    running_deployment,
)
from trtllm_disagg.deployment.cli import add_arguments, run
from trtllm_disagg.deployment.plan import LOOPBACK
from trtllm_disagg.deployment.probe import lists_model
from trtllm_disagg.deployment.process import ManagedProcess
from trtllm_disagg.deployment.run_dir import ProcessRecord, is_alive, read_processes
from trtllm_disagg.deployment.serve import ONE_INTERRUPT_SECONDS

DEADLINE = 30.0

# Speaks enough of the HTTP that `up` looks at. A worker also starts a child, as an engine would.
STAND_IN = """
import argparse, http.server, json, os, signal, subprocess, sys

parser = argparse.ArgumentParser()
parser.add_argument("--http-port", type=int)
parser.add_argument("--disaggregation-mode")
parser.add_argument("--crash-role")
parser.add_argument("--unready-role")
parser.add_argument("--stubborn-role")
parser.add_argument("--detach-child", action="store_true")
args, _ = parser.parse_known_args()
role = args.disaggregation_mode or "frontend"

print("stand-in loads the", role, flush=True)
if role == args.crash_role:
    print("no such weights", flush=True)
    sys.exit(3)
if role == args.stubborn_role:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if role != "frontend":
    pause = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    child = subprocess.Popen(pause, start_new_session=args.detach_child)
    print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if role == args.unready_role else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "toy"}]}).encode())
    def log_message(self, *_):
        pass

port = args.http_port or int(os.environ["DYN_SYSTEM_PORT"])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

UP = """
import asyncio, json, sys
from pathlib import Path
from trtllm_disagg.deployment.plan import DeploymentConfig
from trtllm_disagg.deployment.serve import serve
from trtllm_disagg.deployment.status import status_for

settings = json.loads(sys.argv[1])
config = DeploymentConfig(**{**settings, "run_dir": Path(settings["run_dir"])})
sys.exit(asyncio.run(serve(config, status_for(sys.stderr))))
"""


class Up:
    """A running `up`: its two streams, its processes, its end."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.errors = ""

    async def ready_line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            return (await self.process.stdout.readline()).decode()

    async def says(self, text: str) -> None:
        """Reads stderr until a line has `text`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            while line := (await self.process.stderr.readline()).decode():
                self.errors += line
                if text in line:
                    return
        pytest.fail(f"never said {text!r}:\n{self.errors}")

    async def ends(self) -> int:
        """The exit code; afterwards `errors` holds all of stderr."""
        async with asyncio.timeout(DEADLINE):
            output, errors = await self.process.communicate()
        self.errors += errors.decode()
        assert output == b"", "stdout carries only the ready line"
        assert self.process.returncode is not None
        return self.process.returncode

    def records(self) -> dict[str, ProcessRecord]:
        return {record.name: record for record in read_processes(self.run_dir)}

    def pid(self, name: str) -> int:
        return self.records()[name].pid

    def child_pid(self, name: str) -> int:
        words = Path(self.records()[name].log).read_text().split()
        return int(words[words.index("child") + 1])

    def all_pids(self) -> list[int]:
        workers = [name for name in self.records() if name != "frontend"]
        return [self.pid("frontend"), *map(self.pid, workers), *map(self.child_pid, workers)]


StartUp = Callable[..., Awaitable[Up]]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    command = (sys.executable, "-S", str(script))
    return {
        "strategy": "decode_first",
        "model": "models/toy",
        "served_model_name": "toy",
        "run_dir": tmp_path / "run",
        "http_port": 0,
        "worker_command": command,
        "frontend_command": command,
    }


@pytest.fixture
def config(settings: dict[str, Any]) -> DeploymentConfig:
    return DeploymentConfig(**settings)


@pytest.fixture
async def start_up(settings: dict[str, Any]) -> AsyncIterator[StartUp]:
    started: list[Up] = []

    async def start(**changes: Any) -> Up:
        changed = {**settings, **changes}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", UP, json.dumps(changed, default=str)),
            env={**os.environ, "PYTHONPATH": str(Path(trtllm_disagg.__file__).parents[1])},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(Up(process, changed["run_dir"]))
        return started[-1]

    yield start
    for up in started:
        if up.process.returncode is None:
            up.process.kill()
            await up.process.communicate()


class Exits:
    """Awaits the end of processes that are not our children; made while they live."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._fds = [os.pidfd_open(pid) for pid in pids]

    async def all_seen(self) -> None:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*(self._seen(fd) for fd in self._fds))

    async def _seen(self, fd: int) -> None:
        seen = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, seen.set)
        try:
            await seen.wait()
        finally:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)


def nothing_runs(run_dir: Path) -> bool:
    return not any(is_alive(record) for record in read_processes(run_dir))


async def test_it_says_ready_once_everything_serves(start_up: StartUp) -> None:
    up = await start_up()

    line = await up.ready_line()

    records = up.records()
    port = records["frontend"].ports["http"]
    assert line == f"ready http://127.0.0.1:{port} model=toy strategy=decode_first\n"
    assert [record.state for record in records.values()] == ["ready"] * 3
    assert list(records) == ["frontend", "prefill-0", "decode-0"]
    assert all(is_alive(record) for record in records.values())
    assert await lists_model(LOOPBACK, port, "toy")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_drains_and_exits_with_0(start_up: StartUp, number: signal.Signals) -> None:
    up = await start_up()
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.send_signal(number)

    assert await up.ends() == 0
    await exits.all_seen()
    assert {record.state for record in up.records().values()} == {"exited"}
    assert "killed" not in up.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_during_load_stops_everything_and_is_the_exit_code(
    start_up: StartUp, number: signal.Signals
) -> None:
    up = await start_up(worker_args=("--unready-role", "prefill"))
    await up.says("decode-0 pid")

    up.process.send_signal(number)

    assert await up.ends() == 128 + number
    assert nothing_runs(up.run_dir)


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("prefill_first", ("prefill-0", "decode-0", "frontend")),
        ("decode_first", ("decode-0", "prefill-0", "frontend")),
        ("agg", ("agg-0", "frontend")),
    ],
)
async def test_who_is_called_stops_after_its_callers(
    start_up: StartUp, strategy: str, order: tuple[str, ...]
) -> None:
    up = await start_up(strategy=strategy)
    await up.ready_line()

    up.process.terminate()
    assert await up.ends() == 0

    words = up.errors.split("stopping; interrupt again to kill at once")[1].split()
    stops = [(words[i - 2], word) for i, word in enumerate(words) if word in ("stopping", "exited")]
    assert stops == [(name, what) for name in order for what in ("stopping", "exited")]


async def test_a_death_before_ready_is_reported_and_ends_everything(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--crash-role", "decode", "--unready-role", "prefill"))

    assert await up.ends() == 1
    assert "decode-0" in up.errors
    assert "died before the deployment was ready: exit code 3" in up.errors
    assert "  no such weights" in up.errors
    assert nothing_runs(up.run_dir)


async def test_a_command_that_does_not_exist_is_reported(start_up: StartUp) -> None:
    up = await start_up(worker_command=("no-such-worker",))

    assert await up.ends() == 1
    assert "prefill-0 cannot be started" in up.errors
    assert nothing_runs(up.run_dir)


async def test_the_startup_timeout_names_who_is_late(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--unready-role", "prefill"), startup_timeout=3.0)

    assert await up.ends() == 1
    assert "not ready after 3 s: prefill-0\n" in up.errors
    assert f"{up.run_dir}/prefill-0.log): child" in up.errors
    assert nothing_runs(up.run_dir)


async def test_a_stop_while_loading_is_clean(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--unready-role", "prefill"))
    await up.says("decode-0 pid")
    await up.says("ready")

    up.process.terminate()

    assert await up.ends() == 0
    assert nothing_runs(up.run_dir)


async def test_a_worker_that_dies_while_serving_is_reported_and_the_rest_goes_on(start_up: StartUp) -> None:
    up = await start_up(decode_workers=2)
    await up.ready_line()
    engine = Exits([up.child_pid("decode-1")])

    os.kill(up.pid("decode-1"), signal.SIGKILL)

    await up.says("died while serving: killed by SIGKILL")
    await up.says("stand-in loads the decode")
    await up.says("the other processes keep running")
    await engine.all_seen()
    assert up.records()["decode-1"].state == "exited"
    assert is_alive(up.records()["decode-0"])
    assert await lists_model(LOOPBACK, up.records()["frontend"].ports["http"], "toy")
    up.process.terminate()
    assert await up.ends() == 0


async def test_a_dead_frontend_ends_everything(start_up: StartUp) -> None:
    up = await start_up()
    await up.ready_line()
    exits = Exits(up.all_pids())

    os.kill(up.pid("frontend"), signal.SIGSEGV)

    assert await up.ends() == 1
    await exits.all_seen()
    assert "frontend" in up.errors
    assert "killed by SIGSEGV" in up.errors


async def test_who_ignores_the_order_to_stop_is_killed_and_named(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--stubborn-role", "prefill"), stop_timeout=2.0)
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.terminate()

    assert await up.ends() == 1
    await exits.all_seen()
    assert "after the order to stop, killed: prefill-0\n" in up.errors
    assert "frontend pid" in up.errors
    assert up.errors.count("exited (exit code 0)") == 2


async def test_the_second_interrupt_kills_at_once(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--stubborn-role", "decode"), stop_timeout=600.0)
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.send_signal(signal.SIGINT)
    await up.says("interrupt again to kill at once")
    # Sooner it would count as an echo of the first one.
    await asyncio.sleep(ONE_INTERRUPT_SECONDS + 0.05)
    up.process.send_signal(signal.SIGINT)

    assert await up.ends() == 1
    await exits.all_seen()


async def test_two_signals_at_once_are_one_wish_to_stop(start_up: StartUp) -> None:
    up = await start_up()
    await up.ready_line()
    exits = Exits(up.all_pids())

    # What `timeout` does: its child, then its process group.
    up.process.send_signal(signal.SIGTERM)
    up.process.send_signal(signal.SIGINT)

    assert await up.ends() == 0
    await exits.all_seen()


async def test_a_clean_stop_takes_children_in_other_sessions_along(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--detach-child",))
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.terminate()

    assert await up.ends() == 0
    await exits.all_seen()


@pytest.mark.parametrize("worker_args", [("--stubborn-role", "prefill"), ("--detach-child",)])
async def test_kill_9_of_up_leaves_no_orphan(start_up: StartUp, worker_args: tuple[str, ...]) -> None:
    up = await start_up(worker_args=worker_args)
    await up.ready_line()
    exits = Exits(up.all_pids())

    up.process.kill()

    await exits.all_seen()
    assert await up.ends() == -signal.SIGKILL


async def test_kill_9_of_up_while_loading_leaves_no_orphan(start_up: StartUp) -> None:
    up = await start_up(worker_args=("--unready-role", "prefill"))
    await up.says("decode-0 pid")
    await up.says("ready")
    exits = Exits(record.pid for record in up.records().values())

    up.process.kill()

    await exits.all_seen()
    assert await up.ends() == -signal.SIGKILL


def test_a_port_in_use_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with closing(socket.create_server((LOOPBACK, 0))) as taken:
        port = taken.getsockname()[1]
        flags = [
            "--strategy",
            "agg",
            "--model",
            "toy",
            "--http-port",
            str(port),
            "--run-dir",
            f"{tmp_path}/run",
        ]
        code = run(parser.parse_args(flags))

    assert code == 2
    assert f"--http-port: {port} is not allowed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


async def test_a_live_run_dir_is_refused_and_not_disturbed(config: DeploymentConfig) -> None:
    async with running_deployment(config) as deployment:
        with pytest.raises(RunDirInUseError, match="frontend"):
            async with running_deployment(config):
                pass
        assert all(is_alive(record) for record in read_processes(config.run_dir))
        assert len(deployment.processes) == 3

    async with running_deployment(config):
        pass


async def test_a_deployment_is_gone_after_its_block_even_when_that_fails(config: DeploymentConfig) -> None:
    seen: list[ManagedProcess] = []

    async def fail_inside() -> None:
        async with running_deployment(config) as deployment:
            seen.extend(deployment.processes)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_inside()

    assert [process.returncode for process in seen] == [0, 0, 0]
    assert nothing_runs(config.run_dir)


async def test_a_deployment_that_does_not_come_up_raises_its_report(settings: dict[str, Any]) -> None:
    config = DeploymentConfig(**settings, worker_args=("--crash-role", "prefill"))

    with pytest.raises(DeploymentFailedError, match=r"(?s)prefill-0.*exit code 3.*no such weights"):
        async with running_deployment(config):
            pass

    assert nothing_runs(config.run_dir)


def test_a_deployment_in_the_background_needs_no_event_loop(config: DeploymentConfig) -> None:
    with deployment_in_background(config) as deployment:
        (decode,) = deployment.of_role("decode")
        assert "stand-in loads the decode" in decode.log.read_text()
        assert asyncio.run(lists_model(LOOPBACK, deployment.config.http_port, "toy"))

    assert all(process.returncode == 0 for process in deployment.processes)


def test_a_failure_in_the_background_reaches_the_caller(settings: dict[str, Any]) -> None:
    config = DeploymentConfig(**settings, worker_args=("--crash-role", "prefill"))

    with pytest.raises(DeploymentFailedError, match="exit code 3"), deployment_in_background(config):
        pass

    assert nothing_runs(config.run_dir)
