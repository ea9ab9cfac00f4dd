"""The scripts of benchmarks/, which is no package and not in the wheel."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> Any:
    """The module; as when it is run, its folder is where imports look first."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return import_module(name)
