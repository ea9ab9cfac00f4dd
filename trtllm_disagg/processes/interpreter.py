"""The Python of the processes that this package starts."""

import os
import sys

#: For the processes that a library starts in its turn.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python(*arguments: str) -> tuple[str, ...]:
    """The command line of this interpreter that imports nothing from the directory it is started in.

    `python -m` and `python -c` put that directory first, so that a file `yaml.py` there would run in a worker. What
    the user has in PYTHONPATH is found as ever.
    """
    return (sys.executable, "-P", *arguments)


def leave_current_directory() -> None:
    """For a process that was itself started by `python -m`: from now on it imports nothing from there either."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", _current_directory()):
        del sys.path[0]


# Nothing but what Python has imported already may be needed above, `from __future__` included.
def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
