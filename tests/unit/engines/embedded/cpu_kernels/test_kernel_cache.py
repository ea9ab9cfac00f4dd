"""A kernel is compiled by one process, and its code is on disk whole or not at all."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

if not this_cpu().compiles:
    pytest.skip("this CPU level compiles nothing", allow_module_level=True)

from trtllm_disagg.engines.embedded.cpu_kernels.compiled import CompileLocks, Kernel, compile_unless_locked


def double(x: int) -> int:
    return x + x


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def new_kernel(tmp_path: Path, said: list[str]) -> Callable[[], Any]:
    """Each call is like another process: the same function, nothing of it in memory."""

    def make() -> Any:
        class Own(Kernel):
            folder = tmp_path
            locks = CompileLocks(said.append)

        kernel = Own(double, targetoptions={"nopython": True})
        kernel.enable_caching()
        return kernel

    return make


def compiled_and_loaded(kernel: Any) -> tuple[int, int]:
    return sum(kernel.stats.cache_misses.values()), sum(kernel.stats.cache_hits.values())


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kernel"))


def test_compiled_kernel_is_loaded_and_not_compiled_again(
    tmp_path: Path, new_kernel: Callable[[], Any], said: list[str]
) -> None:
    first, second = new_kernel(), new_kernel()
    assert (first(4), second(5)) == (8, 10)
    assert (compiled_and_loaded(first), compiled_and_loaded(second)) == ((1, 0), (0, 1))
    assert said == ["compiling kernels (once)"]
    assert len(kept(tmp_path)) == 1


def test_kernel_cache_has_an_entry_for_each_argument_type(
    tmp_path: Path, new_kernel: Callable[[], Any]
) -> None:
    kernel = new_kernel()
    assert (kernel(4), kernel(0.25)) == (8, 0.5)
    assert len(kept(tmp_path)) == 2
    assert new_kernel()(0.25) == 0.5


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_compiled_again(
    tmp_path: Path, new_kernel: Callable[[], Any], damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert new_kernel()(4) == 8
    (entry,) = kept(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2] if damage is None else damage)

    repaired = new_kernel()
    assert (repaired(4), compiled_and_loaded(repaired)) == (8, (1, 0))
    assert "damaged" in caplog.text
    after = new_kernel()
    assert (after(4), compiled_and_loaded(after)) == (8, (0, 1))


def test_missing_kernel_folder_compiles_without_caching(
    tmp_path: Path, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Kernel):
        folder = tmp_path / "gone"
        locks = CompileLocks(said.append)

    kernel = Own(double, targetoptions={"nopython": True})
    kernel.enable_caching()
    assert kernel(4) == 8
    assert "cannot lock" in caplog.text
    assert "cannot keep a compiled kernel" in caplog.text


def test_draft_of_a_killed_writer_is_removed(tmp_path: Path, new_kernel: Callable[[], Any]) -> None:
    assert new_kernel()(4) == 8
    (entry,) = kept(tmp_path)
    entry.replace(entry.with_suffix(".123.draft"))
    assert new_kernel()(4) == 8
    assert list(tmp_path.glob("*.draft")) == []
    assert kept(tmp_path) == [entry]


#: Its compilation starts with a line on standard output and goes on after one on standard input.
PROGRAM = """
import logging, sys
from numba.extending import overload
from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compile_unless_locked, compiled

logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)

def helper(x):
    pass

@overload(helper)
def _helper(x):
    print("inside", flush=True)
    sys.stdin.readline()
    return lambda x: x + x

@compiled()
def double(x):
    return helper(x)

if sys.argv[1:] == ["unless-taken"]:
    print("is compiled", compile_unless_locked(double, 21), flush=True)
print("result", double(21), sum(double.stats.cache_misses.values()), flush=True)
print("SciPy is", "imported" if "scipy.linalg" in sys.modules else "not imported", flush=True)
"""


class Process:
    def __init__(self, program: Path, folder: Path, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(program), *args],
            env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, start: str) -> str:
        """The first line that starts so."""
        for line in self._pipe(self._process.stdout):
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"the process ended without {start!r}")

    def go_on(self) -> None:
        stdin = self._pipe(self._process.stdin)
        stdin.write("\n")
        stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@pytest.fixture
def start(tmp_path: Path) -> Any:
    # A file: numba reads the source of what it compiles.
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started: list[Process] = []

    def start(*args: str) -> Process:
        started.append(Process(program, tmp_path, *args))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_a_second_process_waits_for_the_first_one_and_loads(start: Callable[[], Process]) -> None:
    first = start()
    first.until("inside")
    second = start()
    second.until("waiting for another process that compiles kernels")
    first.go_on()
    assert first.until("result") == "result 42 1"
    assert second.until("result") == "result 42 0"
    assert second.until("SciPy") == "SciPy is not imported"


def test_kernel_being_compiled_by_another_process_is_not_compiled_twice(
    start: Callable[..., Process],
) -> None:
    first = start()
    first.until("inside")
    second = start("unless-taken")
    assert second.until("is compiled") == "is compiled False"
    second.until("waiting for another process that compiles kernels")
    first.go_on()
    assert first.until("result") == "result 42 1"
    assert second.until("result") == "result 42 0"


def test_a_kernel_that_no_process_compiles_is_compiled_ahead_once(new_kernel: Callable[[], Any]) -> None:
    first, second = new_kernel(), new_kernel()
    assert compile_unless_locked(first, 4)
    assert first(4) == 8
    assert compile_unless_locked(second, 4)
    assert second(4) == 8
    assert (compiled_and_loaded(first), compiled_and_loaded(second)) == ((1, 0), (0, 1))


def test_wait_for_several_kernels_is_reported_once(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, others = CompileLocks(said.append), CompileLocks(said.append)
    flock = fcntl.flock
    for name in ("one", "two"):
        with ExitStack() as held:
            held.enter_context(others.released_after())
            others.take(tmp_path / name)

            def release_before_waiting(fd: int, operation: int, held: ExitStack = held) -> None:
                if operation == fcntl.LOCK_EX:
                    held.close()
                flock(fd, operation)

            monkeypatch.setattr(fcntl, "flock", release_before_waiting)
            with locks.released_after():
                locks.take(tmp_path / name)
            monkeypatch.undo()
    assert said == ["waiting for another process that compiles kernels (once)"]


def test_the_death_of_the_compiling_process_lets_the_next_one_compile(start: Callable[[], Process]) -> None:
    first = start()
    first.until("inside")
    second = start()
    second.until("waiting for another process that compiles kernels")
    first.kill()
    second.until("inside")
    second.go_on()
    assert second.until("result") == "result 42 1"
    third = start()
    assert third.until("result") == "result 42 0"
