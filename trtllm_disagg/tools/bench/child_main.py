"""The child's half of `child_process.py`: builds one object and calls its methods until the input ends.

It runs as a script in any Python from 3.10 on, so it imports nothing of this package.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO


def load(factory: str) -> Any:
    """`factory`: `module:name`, or `path/to/file.py:name` for an interpreter without this package."""
    source, _, name = factory.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def serve(factory: str, calls: Iterable[bytes], answers: BinaryIO) -> None:
    """The first line has the fields of the factory's argument, every further line is [method, arguments].

    An exception of a method is sent as its answer. Serving ends with `calls`.
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
    # Output that libraries print to stdout must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # A benchmark that was killed reads no answers.
    with suppress(BrokenPipeError):
        serve(sys.argv[1], sys.stdin.buffer, answers)
    sys.stdout.flush()
    # An orderly exit would wait seconds for thread pools and runtimes, or for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
