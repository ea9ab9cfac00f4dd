"""Small stand-ins for frontend and workers, and an `up` over them as a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest

from trtllm_disagg.tools.up.run_dir import ProcessRecord, is_alive, read_processes

DEADLINE = 30.0

# Serves the HTTP that `up` uses. A worker also starts a child, as an engine would.
STAND_IN = """
import argparse, http.server, json, os, signal, subprocess, sys

parser = argparse.ArgumentParser()
parser.add_argument("--http-port", type=int)
parser.add_argument("--disaggregation-mode")
parser.add_argument("--crash-role")
parser.add_argument("--unready-role")
parser.add_argument("--stubborn-role")
parser.add_argument("--detach-child", action="store_true")
parser.add_argument("--disaggregation-strategy")
parser.add_argument("--crash-file", default="")
parser.add_argument("--unlisted-file", default="")
parser.add_argument("--closed-file", default="")
args, _ = parser.parse_known_args()
role = args.disaggregation_mode or "frontend"

print("stand-in loads the", role, "under", args.disaggregation_strategy, flush=True)
if role == args.crash_role or os.path.exists(args.crash_file):
    print("error: no such weights", flush=True)
    print("the last line is not the cause", flush=True)
    sys.exit(3)
if role == args.stubborn_role:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("leaves by SIGTERM", flush=True), sys.exit(0)))
if role != "frontend":
    pause = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    child = subprocess.Popen(pause, start_new_session=args.detach_child)
    print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        closed = self.path.endswith("/completions") and os.path.exists(args.closed_file)
        if closed:
            print("closed", flush=True)
        self.send_response(404 if closed else 503 if role == args.unready_role else 200)
        self.end_headers()
        listed = [] if os.path.exists(args.unlisted_file) else [{"id": "toy"}]
        if not listed:
            print("lists []", flush=True)
        self.wfile.write(json.dumps({"data": listed}).encode())
    def log_message(self, *_):
        pass

port = args.http_port or int(os.environ["DYN_SYSTEM_PORT"])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

UP = """
import asyncio, json, sys
from pathlib import Path
from trtllm_disagg.tools.up.plan import Backoff
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.lifecycle import serve
from trtllm_disagg.tools.up.status import status_for

settings = json.loads(sys.argv[1])
typed = {"run_dir": Path(settings["run_dir"]), "backoff": Backoff(**settings.get("backoff", {}))}
config = DeploymentConfig(**{**settings, **typed})
sys.exit(asyncio.run(serve(config, status_for(sys.stderr))))
"""


class Up:
    """A running `up`: its streams, its processes, its end."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.errors = ""

    async def ready_line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            return (await self.process.stdout.readline()).decode()

    async def says(self, text: str) -> None:
        """Read stderr until a line has `text`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE):
            while line := (await self.process.stderr.readline()).decode():
                self.errors += line
                if text in line:
                    return
        pytest.fail(f"never said {text!r}:\n{self.errors}")

    def stop_reading_stderr(self) -> None:
        """Make its further writes to stderr fail with EPIPE."""
        stderr = self.process._transport.get_pipe_transport(2)  # type: ignore[attr-defined]
        stderr.close()

    async def ends(self) -> int:
        """Wait for the exit code; afterwards `errors` has all of stderr."""
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

    def log_of(self, name: str) -> str:
        return Path(self.records()[name].log).read_text()

    def child_pid(self, name: str) -> int:
        words = self.log_of(name).split()
        return int(words[len(words) - words[::-1].index("child")])

    def all_pids(self) -> list[int]:
        workers = [name for name in self.records() if name != "frontend"]
        return [self.pid("frontend"), *map(self.pid, workers), *map(self.child_pid, workers)]


StartUp = Callable[..., Awaitable[Up]]


class Exits:
    """Awaits the end of processes that are not our children. Make it while they live."""

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
