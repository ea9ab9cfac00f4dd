"""numba's njit as the kernels use it: no interpreter lock, no checks, and machine code kept on disk.

Compiled code contains the code of what it calls. So it is kept for one version of all kernels together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.embedded.cpu_kernels.kernel_cache import CompileLocks, KernelCache
from trtllm_disagg.embedded.cpu_kernels.kernel_folder import kernel_folder

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _version() -> str:
    """Of all kernels, and of the processor as they may use it."""
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.blake2b(b"".join([*sources, repr(this_cpu()).encode()]), digest_size=6).hexdigest()


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A compiled function whose code outlives the process."""

    folder: ClassVar[Path] = kernel_folder(_version())
    locks: ClassVar[CompileLocks] = CompileLocks()

    def enable_caching(self) -> None:
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
