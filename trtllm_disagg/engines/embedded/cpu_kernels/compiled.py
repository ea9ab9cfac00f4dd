"""numba's njit for the kernels: without interpreter lock and checks, and with machine code kept on disk.

Compiled code contains the code of its callees, so files are valid for one version of all kernels together. One process
compiles a kernel, once per machine; the others wait and load it. A kernel's file is complete or missing, even if the
process that writes it is killed. That process holds a file lock from finding the kernel missing until its file exists;
the operating system drops the lock of a dead process.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import pickle
import platform
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numba
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, NullCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps

from trtllm_disagg.common.reports import Reporter
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

log = logging.getLogger(__name__)

_DIGEST_BYTES = 16
_PRIVATE = 0o700
_HERE = Path(__file__).parent
_BLAS = "scipy.linalg"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class CompileLocks:
    """One file lock per kernel. Not thread safe: numba's own lock lets one thread of a process compile at a time."""

    def __init__(self, say: Callable[[str], None] = log.info) -> None:
        self._say = say
        #: File descriptors of each running compilation; a kernel's compilation compiles the kernels that it calls.
        self._held: list[list[int]] = []
        self._said: set[str] = set()

    @contextmanager
    def released_after(self) -> Iterator[None]:
        self._held.append([])
        try:
            yield
        finally:
            for fd in self._held.pop():
                os.close(fd)

    def take(self, file: Path) -> None:
        """Lock `file`, inside `released_after`. Waits while another process compiles its kernel."""
        try:
            fd = os.open(_lock_of(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._held[-1].append(fd)
            self._wait_for(fd)
            # Drafts are of processes that were killed.
            for draft in file.parent.glob(f"{file.stem}.*.draft"):
                draft.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot lock %s (%s): it may be compiled more than once", file, error)

    def is_locked(self, file: Path) -> bool:
        """Whether another process is compiling the kernel of `file`."""
        try:
            with _lock_of(file).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no such place
            pass
        return False

    def compiles(self) -> None:
        self._report("compiling kernels (once)")

    def _wait_for(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._report("waiting for another process that compiles kernels (once)")
            fcntl.flock(fd, fcntl.LOCK_EX)

    def _report(self, what: str) -> None:
        """Report once per process, not per kernel."""
        if what not in self._said:
            self._said.add(what)
            self._say(what)


class KernelCache(NullCache):  # type: ignore[misc]
    """The machine code of one function. numba looks here before it compiles, and saves the result here."""

    def __init__(self, function: Any, folder: Path, locks: CompileLocks) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._folder = folder
        self._locks = locks
        self._codec = _Codec()

    def is_kept(self, sig: Any, target_context: Any) -> bool:
        return self._file(sig, target_context.codegen()).exists()

    def is_locked(self, sig: Any, target_context: Any) -> bool:
        return self._locks.is_locked(self._file(sig, target_context.codegen()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with _without_blas():
            target_context.refresh()
        file = self._file(sig, target_context.codegen())
        found = self._load(file, target_context)
        if found is None:
            self._locks.take(file)
            # Another process may have written it meanwhile.
            found = self._load(file, target_context)
        if found is None:
            self._locks.compiles()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        payload = dumps(self._codec.reduce(data))
        file = self._file(sig, data.codegen)
        draft = file.with_suffix(f".{os.getpid()}.draft")
        try:
            draft.write_bytes(_digest(payload) + payload)
            draft.replace(file)
        except OSError as error:
            log.warning("cannot keep a compiled kernel, the next process compiles it again: %s", error)

    def _load(self, file: Path, target_context: Any) -> Any:
        try:
            stored = file.read_bytes()
        except OSError:
            return None
        payload = stored[_DIGEST_BYTES:]
        if _digest(payload) != stored[:_DIGEST_BYTES]:
            log.warning("%s is damaged and compiled again", file)
            return None
        return self._codec.rebuild(target_context, payload)

    def _file(self, sig: Any, codegen: Any) -> Path:
        """Path with a hash of argument types, processor, its features and versions."""
        what = (str(sig), codegen.magic_tuple(), numba.__version__, platform.python_version())
        return self._folder / f"{self._name}.{_digest(repr(what).encode()).hex()}.kernel"


@contextmanager
def _without_blas() -> Iterator[None]:
    """numba looks for the BLAS in SciPy; importing that is a tenth of an engine's start. No kernel calls it."""
    if _BLAS in sys.modules:
        yield
        return
    sys.modules[_BLAS] = None  # type: ignore[assignment]  # "cannot be imported"
    try:
        yield
    finally:
        del sys.modules[_BLAS]


class _Codec(CompileResultCacheImpl):  # type: ignore[misc]
    """What numba keeps of compiled code, without its choice of a file."""

    def __init__(self) -> None:
        pass

    def rebuild(self, target_context: Any, payload: bytes) -> Any:
        return super().rebuild(target_context, pickle.loads(payload))


def _lock_of(file: Path) -> Path:
    return file.with_suffix(".lock")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def kernel_folder(name: str, environ: Mapping[str, str] = os.environ, beside: Path = _HERE) -> Path | None:
    """Find or make the folder `name`. `beside`: the package's folder.

    Only this user may be able to write to it, since its files are executed. It is beside the source if possible, else
    in the user's cache directory; None: kernels stay in memory. `NUMBA_CACHE_DIR` names another place.
    """
    tried = [place / name for place in _places(environ, beside)]
    for folder in tried:
        if _is_private(folder):
            return folder
    log.warning(
        "this process compiles its kernels for itself, which takes seconds: there is no folder to keep them in that "
        "belongs to this user and that others cannot write to (tried %s; NUMBA_CACHE_DIR can name one)",
        ", ".join(map(str, tried)),
    )
    return None


def _places(environ: Mapping[str, str], beside: Path) -> Iterator[Path]:
    if chosen := environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen).absolute() / "trtllm-disagg"
        return
    yield beside / "__pycache__" / "kernels"
    if caches := environ.get("XDG_CACHE_HOME"):
        yield Path(caches).absolute() / "trtllm-disagg" / "kernels"
    elif home := environ.get("HOME"):
        yield Path(home).absolute() / ".cache" / "trtllm-disagg" / "kernels"


def _is_private(folder: Path) -> bool:
    """Make the folder if missing. Whether it belongs to this user, and only this user may write there."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)


def _version() -> str:
    """Hash of all kernels' sources and of the processor features that they may use."""
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.blake2b(b"".join([*sources, repr(this_cpu()).encode()]), digest_size=6).hexdigest()


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function. With a kernel folder, its code outlives the process."""

    folder: ClassVar[Path | None] = kernel_folder(_version())
    locks: ClassVar[CompileLocks] = CompileLocks()

    def enable_caching(self) -> None:
        if self.folder is not None:
            self._cache = KernelCache(self.py_func, self.folder, self.locks)

    def compile(self, sig: Any) -> Any:
        with global_compiler_lock, self.locks.released_after():
            return super().compile(sig)


def compiled(*, inner: bool = False, **options: Any) -> Callable[[_Function], _Function]:
    """Decorator. Compiled at the first call with new types, which takes seconds once on a machine. An `inner` function
    is called by other kernels only: without an entrance for Python it takes less.
    """

    def decorate(function: _Function) -> _Function:
        settings = {"nopython": True, "boundscheck": False, "nogil": True, "error_model": "numpy"}
        if inner:
            settings |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        kernel: Any = Kernel(function, targetoptions=settings | options)
        kernel.enable_caching()
        made: _Function = kernel
        return made

    return decorate


def compile_unless_locked(kernel: Any, *arguments: Any) -> bool:
    """Compile a kernel for arguments of these types before it is called, unless it is kept already. False: another
    process is at it. This one can compile other kernels meanwhile, and waits only when it calls this one.
    """
    sig = tuple(kernel.typeof_pyval(argument) for argument in arguments)
    if kernel.folder is not None and not kernel._cache.is_kept(sig, kernel.targetctx):
        if kernel._cache.is_locked(sig, kernel.targetctx):
            return False
        kernel.compile(sig)
    return True


@contextmanager
def reporting_compilation(reporter: Reporter) -> Iterator[None]:
    """Inside the block the reporter tells of every kernel that numba compiles, and does not only load: that takes
    seconds, once on a machine.
    """

    class Compiled(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            reporter.report("compiling kernels (once)")

        def on_end(self, event: Any) -> None:
            """The next step tells what comes next."""

    with event.install_listener("numba:compile", Compiled()):
        yield
