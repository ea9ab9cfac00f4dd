"""Runs one object in a child process, which waits for calls on its standard input and ends when that is closed.

A call is a line of JSON with a method and its arguments, and so is its answer (`child_main.py` is the other end). The
engines of `benchmarks/engine.py` and the sender of `bench transfer` run like this.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtllm_disagg.errors import DisaggError, EngineError
from trtllm_disagg.processes.machine import is_computing
from trtllm_disagg.tools.bench import child_main

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_END_SECONDS, _HURRY_SECONDS = 10.0, 1.0
_ANSWER_SECONDS = 900.0
_SLEEP_SECONDS = 2.0
_POLL_SECONDS = 0.005


class ChildProcess:
    """Raises `failure`, with the cause, if a call fails in the child or the child has ended."""

    def __init__(
        self,
        factory: str,
        start: DataclassInstance,
        variables: dict[str, str],
        *,
        interpreter: str = sys.executable,
        failure: type[DisaggError] = EngineError,
    ) -> None:
        """`factory` (see child_main.load) gets the fields of `start`; `await_ready` waits until it is built."""
        from trtllm_disagg.engines.embedded.cpu_kernels.cpu import environment_of

        self._factory, self._failure = factory, failure
        self._process = subprocess.Popen(
            (interpreter, "-P", child_main.__file__, factory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment_of(os.environ) | variables,
            # Ctrl-C reaches only the parent, which then ends this process.
            process_group=0,
        )
        self._send(asdict(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self._send([method, arguments])
        return self._answer()

    def await_sleep(self) -> None:
        """Waits until the child's thread pools no longer spin, which they do for up to 0.2 s after their work."""
        deadline = time.monotonic() + _SLEEP_SECONDS
        while is_computing(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Lets the child end by itself, and kills it after `seconds`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = kind is not None and not issubclass(kind, Exception)
        self.close(_HURRY_SECONDS if interrupted else _END_SECONDS)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` reports why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise self._failure(f"{self._factory}: no answer for {_ANSWER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise self._failure(f"{self._factory}: the process ended with exit code {code}")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise self._failure(f"{self._factory}: {answer['error']}")
        return answer["value"]
