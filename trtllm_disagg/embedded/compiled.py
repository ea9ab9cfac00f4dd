"""numba's njit as the kernels use it: no interpreter lock, no checks, and machine code kept on disk.

numba keeps a function's code until that function's own source changes, whatever becomes of what it calls. So its
name on disk says which version of all kernels it belongs to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit

_SOURCES = (
    "attend_kernels",
    "compiled",
    "decode_step",
    "head_sums",
    "kernels",
    "lanes",
    "panel_product",
    "team",
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _version() -> str:
    here = Path(__file__).parent
    return hashlib.blake2b(
        b"".join((here / f"{name}.py").read_bytes() for name in _SOURCES), digest_size=6
    ).hexdigest()


_VERSION = _version()


def compiled(**options: Any) -> Callable[[_Function], _Function]:
    """Decorator. Compiled at the first call with new types, which takes seconds once on a machine."""

    def decorate(function: _Function) -> _Function:
        function.__qualname__ += f"_{_VERSION}"
        settings = {"boundscheck": False, "nogil": True, "error_model": "numpy", "cache": True}
        kernel: _Function = njit(**settings | options)(function)
        return kernel

    return decorate
