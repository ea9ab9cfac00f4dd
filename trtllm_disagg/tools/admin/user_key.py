"""The key of workers that a user starts one by one. As a program, creates it if needed and prints its path."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trtllm_disagg.admin.keys import AdminKey


def user_key(environ: Mapping[str, str]) -> Path:
    """Path of this user's key. The file need not exist yet."""
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/", ".local", "state")
    return Path(state, "trtllm-disagg", "admin.key")


def make_once(key: Path) -> None:
    """Creates the key unless it exists. Of two processes at once, the first one wins. Raises OSError."""
    key.parent.mkdir(parents=True, exist_ok=True)
    draft = key.with_name(f"draft.{os.getpid()}")
    try:
        AdminKey.create(draft)
        with suppress(FileExistsError):
            os.link(draft, key)
    finally:
        draft.unlink(missing_ok=True)


def main() -> None:
    key = user_key(os.environ)
    try:
        if not key.exists():
            make_once(key)
    except OSError:
        without = "workers will refuse `trtllm-disagg switch` and `set`"
        print(f"cannot create a key in {key.parent}: {without}", file=sys.stderr)
    else:
        print(key)


if __name__ == "__main__":
    main()
