"""The key of a deployment: a process that has it may change what the workers do."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from trtllm_disagg.errors import ConfigError

KEY_BYTES = 32
#: Of every key that `up` makes, in its run directory.
KEY_FILE = "key"
_MOST_BYTES = 4096


class AdminKey:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        #: Names the key and tells nothing about it.
        self.id = hashlib.sha256(b"trtllm-disagg key id" + secret).hexdigest()[:12]

    @classmethod
    def create(cls, path: Path) -> AdminKey:
        """A new one, in place of what is at `path`, that only this user can read. Raises OSError."""
        path.unlink(missing_ok=True)
        secret = secrets.token_bytes(KEY_BYTES)
        with open(path, "xb", opener=_only_for_this_user) as file:
            file.write(secret)
        return cls(secret)

    @classmethod
    def read(cls, path: Path, flag: str) -> AdminKey:
        """Raises ConfigError, naming `flag`, for a file that is no key or that others could have read or written."""
        try:
            with path.open("rb") as file:
                status, secret = os.fstat(file.fileno()), file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise _bad_file(flag, path, f"a file that can be read ({error.strerror})") from None
        if status.st_uid not in (os.geteuid(), 0):
            raise _bad_file(flag, path, f"a file of this user; this one belongs to uid {status.st_uid}")
        # A secret that root mounts into a container is given to this user by its group.
        if stat.S_IMODE(status.st_mode) & (0o077 if status.st_uid == os.geteuid() else 0o037):
            raise _bad_file(flag, path, f"a file that no other user can read or write (chmod 600 {path})")
        if not KEY_BYTES <= len(secret) <= _MOST_BYTES:
            raise _bad_file(
                flag, path, f"{KEY_BYTES} to {_MOST_BYTES} random bytes (head -c {KEY_BYTES} /dev/urandom)"
            )
        return cls(secret)

    def signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def has_signed(self, text: str, signature: str) -> bool:
        return hmac.compare_digest(self.signature(text).encode(), signature.encode())


def _only_for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _bad_file(flag: str, path: Path, allowed: str) -> ConfigError:
    return ConfigError.bad_value(flag, str(path), allowed)
