"""The engine core as a process of its own: it receives commands and sends one report per step over a Unix socket.

core_client.py starts it. Standard input carries the start message and stays open; when it closes, the worker has
ended and this process ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from trtllm_disagg.common.reports import reporter_of
from trtllm_disagg.engines.embedded.ipc.messages import (
    AbortRequest,
    AddRequest,
    Command,
    Failed,
    Ready,
    Report,
    Shutdown,
    Start,
    StepReport,
)
from trtllm_disagg.engines.embedded.ipc.sockets import Link, connect
from trtllm_disagg.engines.embedded.tensor_parallel.launch import IN_JOB, exit_with_parent, own_rank
from trtllm_disagg.errors import DisaggError

log = logging.getLogger("trtllm_disagg.engines.embedded")

_FLUSH_SECONDS = 2.0

_commands = msgspec.msgpack.Decoder(Command)

#: `gc.set_threshold` (Python's default: 700, 10, 10). Steps make few reference cycles.
_COLLECTOR_THRESHOLDS = 20_000, 20, 20
#: Seconds without work after which free memory is returned to the system.
_IDLE_SECONDS = 1.0
#: poll accepts at most 24 days.
_LONGEST_WAIT = 86_400.0
#: Checks of a step within its time limit.
_CHECKS_A_STEP = 10


class StepWatch:
    """A context around each step and its commands. If they do not return in time, a thread calls `fail`, since all
    requests would wait for ever. Time while this process is stopped does not count. Misses a step that holds the GIL.
    """

    def __init__(self, max_seconds: float, fail: Callable[[str], None]) -> None:
        self._max_seconds = max_seconds
        self._fail = fail
        #: Odd while a step runs.
        self._begun_and_ended = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._begun_and_ended += 1

    def __exit__(self, *error: object) -> None:
        self._begun_and_ended += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, checks = 0, 0
        while not self._over.wait(self._max_seconds / _CHECKS_A_STEP):
            now = self._begun_and_ended
            checks = checks + 1 if now == seen and now % 2 else 0
            seen = now
            if checks == _CHECKS_A_STEP:
                self._fail(
                    f"a step has not ended after {self._max_seconds:g} s (embedded.step_timeout_seconds)"
                )
                return


class CoreProcess:
    def __init__(self, start: Start) -> None:
        self._link = Link(connect(start.address), _commands)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_active = 0
        #: Process ids of the other ranks, killed when the worker has ended.
        self.others: list[int] = []
        self._poll = select.poll()
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def wake(self) -> None:
        """Make the core run a step. Callable from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def report(self, message: Report) -> None:
        """Callable from any thread."""
        self._link.send(message)

    def fail(self, reason: str) -> None:
        """Report why the engine cannot continue, and end the process. Callable from any thread."""
        self.report(Failed("EngineError", reason))
        self._link.flush(_FLUSH_SECONDS)
        os._exit(1)

    def kill_others(self) -> None:
        for pid in self.others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def serve(self, core: Any, step_timeout_seconds: float | None) -> None:
        """Run the core until Shutdown; sleep while it has no work."""
        if step_timeout_seconds is None:
            self._serve(core, contextlib.nullcontext())
            return
        watch = StepWatch(step_timeout_seconds, self.fail)
        try:
            self._serve(core, watch)
        finally:
            watch.close()

    def _serve(self, core: Any, watch: AbstractContextManager[None]) -> None:
        ready: Ready = core.ready
        self.others = ready.pids[1:]
        self.report(ready)
        memory_is_returned = False
        while True:
            timeout = 0.0 if core.has_work else core.seconds_to_deadline()
            if not memory_is_returned:
                timeout = _IDLE_SECONDS if timeout is None else min(timeout, _IDLE_SECONDS)
            commands = self._take(self._wait(timeout))
            is_idle = not (commands or core.has_work)
            if is_idle and not memory_is_returned:
                _return_free_memory()
            memory_is_returned = is_idle
            with watch:
                if not _apply(commands, core):
                    return
                report: StepReport = core.step()
            if report.outputs or report.events or report.stats or report.num_active != self._num_active:
                self._num_active = report.num_active
                self.report(report)

    def close(self) -> None:
        self._link.flush(_FLUSH_SECONDS)
        self._link.close()

    def _wait(self, timeout: float | None) -> list[int]:
        """Wait up to `timeout` seconds (None: for ever), a day at most; return the readable descriptors."""
        if timeout is not None:
            timeout = int(min(timeout, _LONGEST_WAIT) * 1000) + (timeout > 0)
        return [fd for fd, _ in self._poll.poll(timeout)]

    def _take(self, ready_fds: list[int]) -> list[Command]:
        commands: list[Command] = []
        for fd in ready_fds:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            else:
                commands = self._commands()
        return commands

    def _commands(self) -> list[Command]:
        try:
            return self._link.receive(wait=False)
        except EOFError:
            self._poll.unregister(self._link)  # the thread that watches the parent ends this process
            return []


def _apply(commands: list[Command], core: Any) -> bool:
    """Apply the commands to the core; False after Shutdown."""
    for command in commands:
        match command:
            case Shutdown():
                return False
            case AddRequest():
                core.add(command)
            case AbortRequest(request_id):
                core.abort(request_id)
    return True


def main() -> int:
    # Only this user may read the engine's files, such as UCX's shared memory.
    os.umask(0o077)
    # Ctrl-C reaches the whole process group; the worker decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if own_rank():
        from trtllm_disagg.engines.embedded.tensor_parallel.follower import serve_as_follower

        return serve_as_follower()
    start = msgspec.json.decode(_read_line(), type=Start)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    process = CoreProcess(start)
    exit_with_parent(process.kill_others)
    try:
        core = _build(start, process)
    except Exception as error:
        if not isinstance(error, DisaggError):
            log.exception("engine start failed")
        process.report(Failed(type(error).__name__, str(error)))
        process.close()
        return 1
    try:
        process.serve(core, start.step_timeout_seconds)
    finally:
        core.close()
        process.close()
    if IN_JOB in sys.argv:
        from trtllm_disagg.engines.embedded.tensor_parallel.group import leave

        leave()
    return 0


def _read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (part := os.read(0, 65536)):
            raise SystemExit("the worker ended before it sent the start message")
        line += part
    return bytes(line)


def _build(start: Start, process: CoreProcess) -> Any:
    reporter = reporter_of(os.environ)
    reporter.report("loading libraries")
    module, _, function = start.builder.partition(":")
    with _collector_off():
        build = getattr(importlib.import_module(module), function)
    core = build(start.args, process, reporter)
    gc.collect()
    return core


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Turns the garbage collector off, and lets it skip the objects made inside: they live until the process ends.
    Collecting took a seventh of an engine's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*_COLLECTOR_THRESHOLDS)
        gc.enable()


def _return_free_memory() -> None:
    """Return freed memory (of loading, packing, long prompts) that glibc would keep."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    if IN_JOB in sys.argv:  # the launcher waits for the end of MPI, which happens in the C library's exit
        sys.exit(status)
    # All is closed; unloading torch and UCX would only delay the worker's shutdown by seconds.
    os._exit(status)
