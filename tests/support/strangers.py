"""Programs that run as another user of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

#: A user without rights.
UID = 65534

#: After the change of user, an interpreter in a home directory is unreadable.
_BECOME = """
import ctypes, encodings.idna, glob, importlib, json, mmap, os, random, select, signal, socket, ssl, struct, sys, time
for name in os.environ.get("STRANGERS_PACKAGES", "").split():
    importlib.import_module(name)
uid = int(sys.argv.pop())
os.setgroups([]); os.setgid(uid); os.setuid(uid)
assert os.getresuid() == (uid,) * 3
"""


def require() -> None:
    """Skip if this process cannot become another user."""
    if os.geteuid() != 0:
        pytest.skip("playing another user needs root (setuid)")


def as_stranger(
    program: str,
    *arguments: str,
    packages: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    seconds: float = 60.0,
    uid: int = UID,
) -> Any:
    """Run a Python program as another user, with the modules above and `packages`. Returns its last line's JSON."""
    done = subprocess.run(
        [sys.executable, "-c", _BECOME + program, *arguments, str(uid)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"STRANGERS_PACKAGES": " ".join(packages), "HOME": "/tmp"} | (env or {}),
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
