"""One engine a process: it sleeps on its standard input until it is asked, so that nobody disturbs who is measured.

A line of JSON names a method and its arguments, a line answers. The process ends when its input does.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from trtllm_disagg.embedded.cpu_kernels.cpu import environment_of
from trtllm_disagg.errors import EngineError
from trtllm_disagg.interpreter import python

_TIMEOUT_SECONDS = 10
_ANSWER_SECONDS = 900.0
_SLEEP_SECONDS = 2.0
_POLL_SECONDS = 0.005


class Start(msgspec.Struct, frozen=True):
    """The first line: what to build."""

    model: str
    dtype: str
    threads: int
    vocab_size: int
    #: Rows that decode at once, and tokens of the longest sequence.
    max_batch: int
    max_tokens: int


class Call(msgspec.Struct):
    method: str
    arguments: list[Any]


class Answer(msgspec.Struct):
    value: Any = None
    error: str | None = None


class Remote:
    """Raises EngineError, with the cause, when the other process cannot do what it is asked to, or has ended."""

    def __init__(self, factory: str, start: Start, environment: dict[str, str]) -> None:
        """`factory` is module:class; `await_ready` waits until it is built."""
        self._factory = factory
        self._process = subprocess.Popen(
            python("-m", __name__, factory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment_of(os.environ) | environment,
        )
        self._send(msgspec.json.encode(start))

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self._send(msgspec.json.encode(Call(method, list(arguments))))
        return self._answer()

    def await_sleep(self) -> None:
        """Thread pools spin for a while after their work, up to 0.2 s; whoever is next wants the cores."""
        deadline = time.monotonic() + _SLEEP_SECONDS
        while _runs(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise EngineError(f"{self._factory}: no answer for {_ANSWER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineError(f"{self._factory}: the process ended with exit code {code}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error is not None:
            raise EngineError(f"{self._factory}: {answer.error}")
        return answer.value


def _runs(pid: int) -> bool:
    """Whether any thread of that process is running, or would if it had a core."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def serve(factory: str, calls: BinaryIO, answers: BinaryIO) -> None:
    """An exception is an answer; only the end of `calls` ends this."""
    start = msgspec.json.decode(calls.readline(), type=Start)
    module, _, name = factory.partition(":")
    try:
        served = getattr(import_module(module), name)(start)
    except Exception as error:
        _write(answers, Answer(error=f"{type(error).__name__}: {error}"))
        return
    _write(answers, Answer())
    for line in calls:
        call = msgspec.json.decode(line, type=Call)
        try:
            answer = Answer(getattr(served, call.method)(*call.arguments))
        except Exception as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        _write(answers, answer)
    served.close()


def _write(stream: BinaryIO, answer: Answer) -> None:
    stream.write(msgspec.json.encode(answer) + b"\n")
    stream.flush()


def main() -> None:
    # Libraries print; what they say must not look like an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin.buffer, answers)
    sys.stdout.flush()
    # Taking thread pools and runtimes apart in order would take seconds, and nobody is interested any more.
    os._exit(0)


if __name__ == "__main__":
    main()
