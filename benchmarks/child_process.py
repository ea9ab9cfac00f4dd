"""Runs one object in a child process, which reads calls from its standard input and exits at end of file.

A call is one line of JSON: a method and its arguments; the answer is one line, too. This file is also the child's
script. Any Python from 3.10 on can run it without the package, so its top imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_END_SECONDS, _HURRY_SECONDS = 10.0, 1.0
_ANSWER_SECONDS = 900.0
_SLEEP_SECONDS = 2.0
_POLL_SECONDS = 0.005


def _is_computing(pid: int) -> bool:
    """Whether any thread of the process is running or waiting for a core."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if thread.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class ChildProcess:
    """The object in the child. A call raises EngineError, with the cause, if it fails or the child has exited."""

    def __init__(
        self,
        factory: str,
        start: DataclassInstance,
        variables: dict[str, str],
        interpreter: str = sys.executable,
    ) -> None:
        """`factory` (see `load`) is called with the fields of `start`; `await_ready` waits for its object."""
        from trtllm_disagg.engines.embedded.cpu_kernels.cpu import environment_of

        self._factory = factory
        self._process = subprocess.Popen(
            (interpreter, __file__, factory),
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
        """Wait until the child's thread pools stop spinning, at most 0.2 s after their last work."""
        deadline = time.monotonic() + _SLEEP_SECONDS
        while _is_computing(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Close the child's input, and kill the child if it has not exited after `seconds`."""
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
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = error_type is not None and not issubclass(error_type, Exception)
        self.close(_HURRY_SECONDS if interrupted else _END_SECONDS)

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_answer` reports why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> Any:
        from trtllm_disagg.errors import EngineError

        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]:
            raise EngineError(f"{self._factory}: no answer for {_ANSWER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise EngineError(f"{self._factory}: the process ended with exit code {code}")
        answer = json.loads(line)
        if answer["error"] is not None:
            raise EngineError(f"{self._factory}: {answer['error']}")
        return answer["value"]


# -- in the child


def load(factory: str) -> Any:
    """`factory`: `path/to/file.py:name`."""
    source, _, name = factory.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def serve(factory: str, calls: Iterable[bytes], answers: BinaryIO) -> None:
    """Read the factory's fields from the first line, and [method, arguments] from each further one, until `calls` ends.

    If a method raises, the exception is its answer.
    """

    def answer(value: Any = None, error: Exception | None = None) -> None:
        failure = None if error is None else f"{type(error).__name__}: {error}"
        answers.write(json.dumps({"value": value, "error": failure}).encode() + b"\n")
        answers.flush()

    lines = iter(calls)
    try:
        served = load(factory)(SimpleNamespace(**json.loads(next(lines))))
    except Exception as error:
        answer(error=error)
        return
    answer()
    for line in lines:
        method, arguments = json.loads(line)
        try:
            answer(getattr(served, method)(*arguments))
        except Exception as error:
            answer(error=error)
    served.close()


def main() -> None:
    # Libraries print to stdout; the parent would read that as an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A killed benchmark reads no answers.
    with contextlib.suppress(BrokenPipeError):
        serve(sys.argv[1], sys.stdin.buffer, answers)
    sys.stdout.flush()
    # An orderly exit would wait for thread pools and runtimes: seconds, or for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
