"""Records modules of other houses, and their libraries, that a plugin worker loads. There must be none.

The stand-in of TensorRT-LLM is in engines/. It is loaded first, and its modules are removed from `sys.modules`: its
objects live on, and any later import from engines/ is the plugin's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

ENGINES = "trtllm_disagg.engines"
#: Packages, with all their modules.
NOT_LOADED = (ENGINES, "trtllm_disagg.tools", "torch", "numpy", "nixl", "cryptography", "transformers")
#: Environment variable with the file that each watched process writes.
LOADED = "TEST_LOADED_MODULES"
WATCHED = "watched"


class _Watch(MetaPathFinder):
    """Python asks it for each new module; it finds none."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if is_behind_a_wall(name):
            self.note(name)

    def note(self, line: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{os.getpid()} {line}\n")


def is_behind_a_wall(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in NOT_LOADED)


def watch_imports() -> None:
    """Start watching, once the stand-in is loaded with everything that it imports later."""
    if LOADED not in os.environ:
        return
    watch = _Watch(Path(os.environ[LOADED]))
    watch.note(WATCHED)
    for name in list(sys.modules):
        if name == ENGINES or name.startswith(f"{ENGINES}."):
            del sys.modules[name]
        elif is_behind_a_wall(name):
            watch.note(name)
    sys.meta_path.insert(0, watch)


def loaded_in(file: Path) -> tuple[int, list[str]]:
    """Number of watched processes, and their modules."""
    names = [line.partition(" ")[2] for line in file.read_text().splitlines()]
    return names.count(WATCHED), [name for name in names if name != WATCHED]
