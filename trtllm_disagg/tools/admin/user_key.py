"""The key of the workers that a user starts one by one. As a program it prints the path, and makes the key if needed,
for the launch scripts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trtllm_disagg.admin.keys import AdminKey


def user_key(environ: Mapping[str, str]) -> Path:
    """Path of the key for all workers that this user starts one by one. The file need not exist yet."""
    state = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/", ".local", "state")
    return Path(state, "trtllm-disagg", "admin.key")


def make_once(key: Path) -> None:
    """Make the key unless it exists. When two processes do so at once, the first key stays. Raises OSError."""
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
        without = "the workers will refuse `trtllm-disagg switch` and `set`"
        print(f"no key can be made in {key.parent}: {without}", file=sys.stderr)
    else:
        print(key)


if __name__ == "__main__":
    main()
