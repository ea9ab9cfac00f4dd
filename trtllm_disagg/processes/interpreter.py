"""How this package starts other Python processes."""

import os
import sys

#: The environment that has the same effect on processes which a library starts.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python(*arguments: str) -> tuple[str, ...]:
    """A command line of this interpreter, without the current directory in sys.path, where `python -m` and `python -c`
    put it first: a file `yaml.py` there would run in a worker. PYTHONPATH still counts.
    """
    return (sys.executable, "-P", *arguments)


def environment() -> dict[str, str]:
    """A copy, whatever other threads change meanwhile: `dict(os.environ)` raises KeyError for what they take away."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def leave_current_directory() -> None:
    """Stops a process that was started by `python -m` from importing from the current directory."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", _current_directory()):
        del sys.path[0]


# Until `leave_current_directory` runs, a new import could load a file of that directory, even `from __future__`.
def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
