"""Starts other Python processes."""

import os
import sys

#: The same for processes that a library starts, as environment.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python(*arguments: str) -> tuple[str, ...]:
    """A command line of this interpreter. Unlike `python -m` and `python -c`, it keeps the current directory out of
    sys.path, where a file `yaml.py` would run in a worker. PYTHONPATH still counts.
    """
    return (sys.executable, "-P", *arguments)


def environment() -> dict[str, str]:
    """A copy of os.environ: `dict(os.environ)` raises KeyError if another thread removes a variable meanwhile."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def leave_current_directory() -> None:
    """Keep a process started by `python -m` from importing from the current directory."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", _current_directory()):
        del sys.path[0]


# Until `leave_current_directory` runs, any import could load a file of that directory, even `from __future__`.
def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
