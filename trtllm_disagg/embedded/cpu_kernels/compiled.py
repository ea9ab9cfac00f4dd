"""numba's njit as the kernels use it: no interpreter lock, no checks, and machine code kept on disk.

Compiled code contains the code of what it calls. So it is kept for one version of all kernels together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from numba.core import event
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.embedded.cpu_kernels.kernel_cache import CompileLocks, KernelCache, kernel_folder
from trtllm_disagg.processes.activity import Reporter

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _version() -> str:
    """Of all kernels, and of the processor as they may use it."""
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.blake2b(b"".join([*sources, repr(this_cpu()).encode()]), digest_size=6).hexdigest()


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function; its code outlives the process."""

    folder: ClassVar[Path] = kernel_folder(_version())
    locks: ClassVar[CompileLocks] = CompileLocks()

    def enable_caching(self) -> None:
        self._cache = KernelCache(self.py_func, self.folder, self.locks)

    def compile(self, sig: Any) -> Any:
        with global_compiler_lock, self.locks.released_after():
            return super().compile(sig)

    def compile_unless_taken(self, *arguments: Any) -> bool:
        sig = tuple(self.typeof_pyval(argument) for argument in arguments)
        if not self._cache.is_kept(sig, self.targetctx):
            if self._cache.is_taken(sig, self.targetctx):
                return False
            self.compile(sig)
        return True


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


def compile_unless_taken(kernel: Any, *arguments: Any) -> bool:
    """Compile a kernel for arguments of these types before it is called, unless it is kept already. False: another
    process is at it. This one can compile other kernels meanwhile, and waits only when it calls this one.
    """
    is_compiled: bool = kernel.compile_unless_taken(*arguments)
    return is_compiled


@contextmanager
def compiling_told(reporter: Reporter) -> Iterator[None]:
    """Inside the block the reporter tells of every kernel that numba compiles, and does not only load: that takes
    seconds, once on a machine.
    """

    class Told(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            reporter.tell("compiling kernels (once)")

        def on_end(self, event: Any) -> None:
            """The next step tells what comes next."""

    with event.install_listener("numba:compile", Told()):
        yield
