"""The worker's end of the engine core process: start it, exchange messages with it, notice its death."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trtllm_disagg import errors
from trtllm_disagg.common.interpreter import environment
from trtllm_disagg.engines.embedded.ipc.messages import (
    BUILDER,
    Command,
    Failed,
    Ready,
    Report,
    Shutdown,
    Start,
    StepReport,
)
from trtllm_disagg.engines.embedded.ipc.sockets import Link, Listener, accept
from trtllm_disagg.engines.embedded.tensor_parallel.launch import Launch, RankWatch, core_launch

log = logging.getLogger(__name__)

REPORTS = msgspec.msgpack.Decoder(Report)
_POLL_SECONDS = 0.2
_END_SECONDS = 5


class CoreClient:
    """`on_report` and `on_death` are called on this client's receiver thread; `send` is thread-safe."""

    def __init__(
        self,
        args: dict[str, Any],
        *,
        num_threads: int,
        num_ranks: int = 1,
        builder: str = BUILDER,
        step_timeout_seconds: float | None = None,
        on_report: Callable[[StepReport], None],
        on_death: Callable[[str], None],
        launch: Callable[[int, int, Mapping[str, str]], Launch] = core_launch,
        end_seconds: float = _END_SECONDS,
    ) -> None:
        """`end_seconds`: how long the process may take to end by itself."""
        self._on_report = on_report
        self._on_death = on_death
        self._closing = False
        self._failure: str | None = None
        self._open = contextlib.ExitStack()
        self._ranks = self._open.enter_context(contextlib.closing(RankWatch(())))
        listener = self._open.enter_context(Listener("core"))
        self._end_seconds = end_seconds
        start = Start(args, listener.path, builder, step_timeout_seconds)
        self._process = _spawn(launch(num_ranks, num_threads, environment()), start)
        try:
            self._link = self._open.enter_context(contextlib.closing(self._accept(listener)))
            self._link.wait_up_to(_POLL_SECONDS)
            self.ready = self._wait_ready()
        except BaseException:
            self._cleanup()
            raise
        self._ranks = self._open.enter_context(contextlib.closing(RankWatch(self.ready.pids)))
        self._receiver = threading.Thread(target=self._receive, name="engine-receiver", daemon=True)
        self._receiver.start()

    @property
    def alive(self) -> bool:
        return not self._closing and self._process.poll() is None

    def send(self, command: Command) -> None:
        """Send the command. After the core's death it is dropped; `on_death` reports the death."""
        if not self._closing:
            self._link.send(command)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of commands that the core has not received yet."""
        return self._link.unsent_bytes

    def flush(self, seconds: float) -> None:
        """Wait up to `seconds` until all commands are sent."""
        self._link.flush(seconds)

    def close(self) -> None:
        """Ask the core to end; kill it if it does not."""
        if self._closing:
            return
        self.send(Shutdown())
        self._closing = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=self._end_seconds)
        self._receiver.join(timeout=5)
        self._cleanup()

    # -- internals

    def _accept(self, listener: socket.socket) -> Link[Report]:
        listener.settimeout(_POLL_SECONDS)
        while True:
            has_ended = self._process.poll() is not None
            try:
                connection = accept(listener)
            except TimeoutError:
                if has_ended:
                    raise errors.EngineError(f"{self._exit_code()} while starting") from None
            else:
                return Link(connection, REPORTS)

    def _wait_ready(self) -> Ready:
        while True:
            has_ended = self._process.poll() is not None
            try:
                reports = iter(received := self._link.receive(wait=True))
            except EOFError:
                self._end()
                raise errors.EngineError(f"{self._exit_code()} while starting") from None
            if has_ended and not received:
                raise errors.EngineError(f"{self._exit_code()} while starting")
            for report in reports:
                if isinstance(report, Ready):
                    for later in reports:
                        self._handle(later)
                    return report
                if isinstance(report, Failed):
                    raise _start_error(report)

    def _receive(self) -> None:
        try:
            while not self._closing:
                if not self._deliver(wait=True) and not self._closing:
                    self._check_silent_core()
                if self._failure is not None:
                    self._on_death(self._failure)
                    self._end()
                    return
        except Exception as error:
            # Without this thread no request would ever end.
            log.exception("receiving from the engine process failed")
            if not self._closing:
                self._on_death(f"receiving from the engine process failed: {error}")

    def _check_silent_core(self) -> None:
        """After silence: has the core died, or was a rank stopped?"""
        if self._process.poll() is not None:
            self._deliver(wait=False)  # its last messages
            self._failure = self._failure or self._ranks.first_to_end() or self._exit_code()
        elif reason := self._ranks.stopped_rank():
            self._failure = reason
            self._ranks.kill()

    def _deliver(self, *, wait: bool) -> bool:
        """Handle the messages that have arrived; True if there were any."""
        try:
            reports = self._link.receive(wait=wait)
        except EOFError:
            # The core has closed its socket: it ends soon, or it hangs.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._end_seconds)
            if self._process.poll() is None and not self._closing:
                self._failure = self._failure or "the engine process has closed its socket"
            return False
        for report in reports:
            self._handle(report)
        return bool(reports)

    def _handle(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self._on_report(report)
        elif isinstance(report, Failed):
            self._failure = f"the engine cannot go on: {report.message}"

    def _exit_code(self) -> str:
        return f"the engine process ended with exit code {self._process.returncode}"

    def _end(self) -> None:
        """Wait for the process to end, and kill it if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=self._end_seconds)
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
        self._open.close()


def _start_error(report: Failed) -> Exception:
    """The core's exception if it is one of ours, else an EngineError that names it."""
    return errors.named(report.kind, report.message) or errors.EngineError(
        f"the engine cannot start: {report.kind}: {report.message}"
    )


def _spawn(launch: Launch, start: Start) -> subprocess.Popen[bytes]:
    process = launch.start()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already; _accept says so
        process.stdin.write(msgspec.json.encode(start) + b"\n")
        process.stdin.flush()
    return process
