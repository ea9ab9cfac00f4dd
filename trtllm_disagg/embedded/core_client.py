"""The worker's end of the engine core process: start it, talk to it, notice its death."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from trtllm_disagg import errors
from trtllm_disagg.embedded.messages import Command, Failed, Ready, Report, Shutdown, StepReport
from trtllm_disagg.embedded.parallel.launch import core_launch
from trtllm_disagg.embedded.parallel.stopped import RankWatch

log = logging.getLogger(__name__)

_reports = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()
_POLL_MS = 200
_SEND_TIMEOUT_MS = 1000
_END_SECONDS = 5


class CoreClient:
    """`on_report` and `on_death` are called on this client's receiver thread; `send` is thread-safe."""

    def __init__(
        self,
        args: dict[str, Any],
        *,
        num_threads: int,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._on_report = on_report
        self._on_death = on_death
        self._lock = threading.Lock()
        self._closing = False
        self._directory = Path(tempfile.mkdtemp(prefix="trtllm-disagg-"))
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH, "commands")
        self._incoming = self._socket(zmq.PULL, "reports")
        self._incoming.setsockopt(zmq.RCVTIMEO, _POLL_MS)
        self._failure: str | None = None
        self._ranks = RankWatch(())
        self._process = self._spawn(args, num_threads)
        try:
            self.ready = self._wait_ready()
        except BaseException:
            self._cleanup()
            raise
        self._ranks = RankWatch(self.ready.pids)
        self._receiver = threading.Thread(target=self._receive, name="engine-receiver", daemon=True)
        self._receiver.start()

    @property
    def alive(self) -> bool:
        return not self._closing and self._process.poll() is None

    def send(self, command: Command) -> None:
        """To a core that has died, nothing is sent; `on_death` tells of that."""
        with self._lock, contextlib.suppress(zmq.Again):
            if self.alive:
                self._commands.send(_encoder.encode(command))

    def close(self) -> None:
        """Ask the core to end, and end it if it does not."""
        if self._closing:
            return
        with contextlib.suppress(zmq.ZMQError):
            self.send(Shutdown())
        with self._lock:
            self._closing = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        self._receiver.join(timeout=5)
        self._cleanup()

    # -- internals

    def _socket(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        # No bound: a slow reader must not stall the engine, nor a busy engine the event loop.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        # Without a peer a send would wait for ever; with one it never waits.
        socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        socket.bind(self._address(name))
        return socket

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory / name}"

    def _spawn(self, args: dict[str, Any], num_threads: int) -> subprocess.Popen[bytes]:
        process = core_launch(args["tensor_parallel_size"], num_threads, os.environ).start()
        start = {
            "args": args,
            "directory": str(self._directory),
            "command_address": self._address("commands"),
            "report_address": self._address("reports"),
        }
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; _wait_ready says so
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
        return process

    def _wait_ready(self) -> Ready:
        while True:
            if self._incoming.poll(_POLL_MS):
                report = _reports.decode(self._incoming.recv())
                if isinstance(report, Ready):
                    return report
                if isinstance(report, Failed):
                    raise _start_error(report)
            elif self._process.poll() is not None:
                raise errors.EngineError(f"{self._exit_code()} while starting")

    def _receive(self) -> None:
        try:
            while not self._closing:
                if not self._deliver() and not self._closing:
                    self._look_after()
                if self._failure is not None:
                    self._on_death(self._failure)
                    self._end()
                    return
        except Exception as error:
            # Without this thread every request would wait for ever.
            log.exception("receiving from the engine process failed")
            if not self._closing:
                self._on_death(f"receiving from the engine process failed: {error}")

    def _look_after(self) -> None:
        """It is silent: because there is nothing to say?"""
        if self._process.poll() is not None:
            while self._deliver(zmq.NOBLOCK):  # what it said last
                pass
            self._failure = self._failure or self._exit_code()
        elif who := self._ranks.who_stopped():
            self._failure = who
            self._ranks.kill()

    def _deliver(self, flags: int = 0) -> bool:
        """The next report, when one comes in time."""
        try:
            # Not poll and then recv: that is twice the work for every step of the engine.
            report = _reports.decode(self._incoming.recv(flags))
        except zmq.Again:
            return False
        if isinstance(report, StepReport):
            self._on_report(report)
        elif isinstance(report, Failed):
            self._failure = f"the engine cannot go on: {report.message}"
        return True

    def _exit_code(self) -> str:
        return f"the engine process ended with exit code {self._process.returncode}"

    def _end(self) -> None:
        """Now, if it does not soon by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_SECONDS)
        self._ranks.kill()
        self._process.kill()
        self._process.wait()

    def _cleanup(self) -> None:
        self._closing = True
        if self._process.poll() is None:
            self._ranks.kill()
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)


def _start_error(report: Failed) -> Exception:
    """The core's own exception where it is one of ours, else an EngineError that names it."""
    kind = getattr(errors, report.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.DisaggError):
        return kind(report.message)
    return errors.EngineError(f"the engine cannot start: {report.kind}: {report.message}")
