"""Dynamo's frontend and workers as real processes, each with a log, and clients for them."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.ports import free_http_port, free_system_ports

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_libc = ctypes.CDLL(None)
START_TIMEOUT = 120.0
SETTLE_TIMEOUT = 15.0
#: Upstream's idle prefill worker would drain for 30 s.
STOP_TIMEOUT = 3.0
JSON = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"


@dataclass
class Answer:
    tokens: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[float]

    @classmethod
    def of(cls, chunks: list[dict[str, Any]]) -> Answer:
        """From a completion with nvext.extra_fields ["completion_token_ids"], streamed or not."""
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        extra = [chunk.get("nvext") or {} for chunk in chunks]
        return cls(
            tokens=[token for fields in extra for token in fields.get("completion_token_ids") or ()],
            text="".join(choice["text"] for choice in choices),
            finish_reason=next((c["finish_reason"] for c in choices if c.get("finish_reason")), None),
            logprobs=[lp for c in choices for lp in (c.get("logprobs") or {}).get("token_logprobs", ())],
        )


@dataclass
class DynamoDeployment:
    """Writes all files, discovery included, below `directory`."""

    directory: Path
    http_port: int = field(default_factory=lambda: free_http_port(LOOPBACK, 0))
    grace_seconds: float = 0.0
    system_ports: dict[str, int] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # -- processes

    def start_frontend(self) -> None:
        self._start(
            "frontend", ["dynamo.frontend", "--router-mode", "kv", "--http-port", str(self.http_port)]
        )

    def start_workers(self, commands: dict[str, list[str]], python: str = sys.executable) -> None:
        """`commands`: name -> arguments after `python -m`."""
        ports = free_system_ports(len(commands))
        self.system_ports |= dict(zip(commands, ports, strict=True))
        for name, command in commands.items():
            self._start(name, command, python, DYN_SYSTEM_PORT=str(self.system_ports[name]))

    def _start(self, name: str, command: list[str], python: str = sys.executable, **variables: str) -> None:
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self.directory / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": f"{self.grace_seconds:g}",
            "TMPDIR": str(self.directory),
        }
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [python, "-m", *command],
                env={**os.environ, **environment, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A killed test run has no teardown.
                preexec_fn=die_with_parent,
            )

    def wait_ready(self, body: dict[str, Any]) -> None:
        """Wait until this completion is answered."""

        def answers() -> bool:
            if dead := [name for name, process in self._processes.items() if process.poll() is not None]:
                pytest.fail(f"{', '.join(dead)} died while starting\n{self.logs()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.post(COMPLETIONS, body)[0] == 200
            return False

        self.wait_until(answers, "ready", START_TIMEOUT)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def kill(self, name: str) -> None:
        """Kill the process at once, without a goodbye."""
        process = self._processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def exit_code(self, name: str) -> int | None:
        return self._processes[name].poll()

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def logs(self) -> str:
        return "\n".join(
            f"--- {name} (exit code {process.poll()})\n{self.log(name)[-6000:]}"
            for name, process in self._processes.items()
        )

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = SETTLE_TIMEOUT) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not after {timeout} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    # -- requests

    def connection(self, port: int = 0) -> contextlib.closing[http.client.HTTPConnection]:
        return contextlib.closing(http.client.HTTPConnection(LOOPBACK, port or self.http_port, timeout=30))

    def post(self, path: str, body: dict[str, Any], port: int = 0) -> tuple[int, bytes]:
        with self.connection(port) as connection:
            connection.request("POST", path, json.dumps(body), JSON)
            response = connection.getresponse()
            return response.status, response.read()

    def post_ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, content = self.post(path, body)
        assert status == 200, f"{status} {content!r}\n{self.logs()}"
        answer: dict[str, Any] = json.loads(content)
        return answer

    def complete(self, body: dict[str, Any]) -> Answer:
        return Answer.of([self.post_ok(COMPLETIONS, body)])

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Close the generator to hang up."""
        with self.connection() as connection:
            connection.request("POST", COMPLETIONS, json.dumps(body | {"stream": True}), JSON)
            response = connection.getresponse()
            assert response.status == 200, f"{response.read()!r}\n{self.logs()}"
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def asks(self, worker: str, body: dict[str, Any]) -> dict[str, Any]:
        """A worker's answer at its system port."""
        status, content = self.post("/engine/trtllm_disagg", body, self.system_ports[worker])
        assert status == 200, f"{status} {content!r}\n{self.logs()}"
        answer: dict[str, Any] = json.loads(content)
        return answer

    def gauge(self, worker: str, name: str) -> float:
        """A worker's own metric, as of its engine's last step."""
        with self.connection(self.system_ports[worker]) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        [line] = [line for line in lines if line.startswith(name + "{")]
        return float(line.split()[-1])
