"""The worker's side of trying grammars: no grammar that takes llguidance without end reaches the engine core, where it
would hold all requests. `trial_process.py` is the process that tries.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import signal
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from trtllm_disagg.engines.embedded.ipc.messages import AddRequest
from trtllm_disagg.errors import DisaggError, EngineError, InvalidRequestError
from trtllm_disagg.processes.interpreter import python

_PROCESS = "trtllm_disagg.engines.embedded.guided_decoding.trial_process"
_REMEMBERED = 256
#: Time to read a large tokenizer on a busy machine.
_START_SECONDS = 120.0
#: From its last sign to its end.
_END_SECONDS = 1.0


class TrialStart(msgspec.Struct, frozen=True):
    """Arguments of the trial process, and the limits for one grammar."""

    #: The directory of the tokenizer.
    tokenizer: str
    vocab_size: int
    end_ids: list[int]
    #: Processor time, so that a busy machine refuses nothing.
    cpu_seconds: float = 2.0
    memory_bytes: int = 1 << 30
    #: Wall time, for a process that makes no progress.
    wall_seconds: float = 30.0


class TrialProcess:
    """The trial process. Used by one thread, except `kill`."""

    def __init__(self, start: TrialStart) -> None:
        self._start = start
        self._is_started = False
        self._process = subprocess.Popen(
            python("-m", _PROCESS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def passes(self, grammar: str) -> bool:
        """False when the grammar killed the process, which is then of no use. Raises EngineError if it cannot start, or
        ends for another reason.
        """
        if not self._is_started:
            self._is_started = self._answers(msgspec.json.encode(self._start), _START_SECONDS)
        if not self._is_started:
            raise EngineError("its process does not start")
        if self._answers(json.dumps(grammar).encode(), self._start.wall_seconds):
            return True
        try:
            killed = self._process.wait(_END_SECONDS) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            raise EngineError(f"its process did not get on for {self._start.wall_seconds:g} s") from None
        if killed:  # by the kernel, which had no memory left, or by hand: its own limits end it otherwise
            raise EngineError("its process was killed")
        return False

    def kill(self) -> None:
        """Make `passes` raise EngineError. Callable from any thread."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        with self._process, contextlib.suppress(BrokenPipeError):
            """Closes its pipes, and waits."""

    def _answers(self, line: bytes, seconds: float) -> bool:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            # A pipe may accept only a part.
            rest = memoryview(line + b"\n")
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except BrokenPipeError:
            return False
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        return bool(poll.poll(seconds * 1000) and self._process.stdout.read(1))


class GrammarTrials:
    """Holds a request while its grammar is tried; requests without an untried grammar pass at once. Thread-safe."""

    def __init__(
        self,
        start: TrialStart,
        send: Callable[[AddRequest], None],
        refuse: Callable[[AddRequest, DisaggError], None],
    ) -> None:
        """`send` passes a request to the engine core without waiting. `refuse` is called on this object's thread."""
        self._start = start
        self._send = send
        self._refuse = refuse
        self._lock = threading.Lock()
        #: The result of each tried grammar; None: it passed.
        self._verdicts: OrderedDict[str, InvalidRequestError | None] = OrderedDict()
        self._waiting: dict[int, AddRequest] = {}
        self._queue: queue.SimpleQueue[AddRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: TrialProcess | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: AddRequest) -> None:
        grammar = request.sampling.grammar
        with self._lock:
            if grammar is None or (grammar in self._verdicts and self._verdicts[grammar] is None):
                self._send(request)
                return
            self._waiting[request.request_id] = request
            self._queue.put(request)
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="grammar-trials", daemon=True)
                self._thread.start()

    def cancel(self, request_id: int) -> AddRequest | None:
        """Remove the request if it waits here, and return it."""
        with self._lock:
            return self._waiting.pop(request_id, None)

    def close(self) -> None:
        """Drop the waiting requests, which are neither sent nor refused."""
        with self._lock:
            self._closing = True
            self._waiting.clear()
            if self._process is not None:
                self._process.kill()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            if request.request_id in self._waiting:
                self._decide(request, self._verdict(request.sampling.grammar or ""))
        if self._process is not None:
            self._process.close()

    def _decide(self, request: AddRequest, verdict: DisaggError | None) -> None:
        with self._lock:
            if self._waiting.pop(request.request_id, None) is None:
                return
            if verdict is None:
                # Here, so that a cancel comes after it.
                self._send(request)
        if verdict is not None:
            self._refuse(request, verdict)

    def _verdict(self, grammar: str) -> DisaggError | None:
        if grammar not in self._verdicts:
            try:
                verdict = self._try(grammar)
            except Exception as error:  # no process, no memory: this request fails, the next one tries again
                return EngineError(f"guided decoding: the grammar cannot be tried: {error}")
            with self._lock:
                self._verdicts[grammar] = verdict
                if len(self._verdicts) > _REMEMBERED:
                    self._verdicts.popitem(last=False)
        return self._verdicts[grammar]

    def _try(self, grammar: str) -> InvalidRequestError | None:
        with self._lock:  # `close` kills what was started
            if self._closing:
                raise EngineError("the engine is shutting down")
            if self._process is not None and self._process.has_ended:
                # It was killed from outside, between two grammars.
                self._process.close()
                self._process = None
            process = self._process = self._process or TrialProcess(self._start)
        with contextlib.ExitStack() as failed:
            failed.callback(self._drop, process)
            if process.passes(grammar):
                failed.pop_all()
                return None
        return InvalidRequestError(
            f"guided decoding: llguidance cannot compile this grammar within {self._start.cpu_seconds:g} s "
            f"of processor time and {self._start.memory_bytes >> 20} MiB"
        )

    def _drop(self, process: TrialProcess) -> None:
        with self._lock:
            self._process = None
        process.close()
