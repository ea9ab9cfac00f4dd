"""A deployment's key, which signs commands to its workers."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from trtllm_disagg.errors import ConfigError

KEY_BYTES = 32
#: The key file that `up` creates in its run directory.
KEY_FILE = "key"
_MAX_BYTES = 4096


class AdminKey:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        #: Identifies the key without revealing it.
        self.id = hashlib.sha256(b"trtllm-disagg key id" + secret).hexdigest()[:12]

    @classmethod
    def create(cls, path: Path) -> AdminKey:
        """Write a new key to `path`, readable only by this user, replacing any file. Raises OSError."""
        path.unlink(missing_ok=True)
        secret = secrets.token_bytes(KEY_BYTES)
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
            file.write(secret)
        return cls(secret)

    @classmethod
    def read(cls, path: Path, flag: str) -> AdminKey:
        """Raises ConfigError, naming `flag`, for a file that is no key or that other users could read or write."""
        expected = (
            f"a file that only its owner may read, with {KEY_BYTES} to {_MAX_BYTES} random bytes "
            f"(head -c {KEY_BYTES} /dev/urandom > FILE && chmod 600 FILE)"
        )
        secret = read_private_file(path, flag, expected, _MAX_BYTES + 1)
        if not KEY_BYTES <= len(secret) <= _MAX_BYTES:
            found = f"it has {len(secret)}" if len(secret) < KEY_BYTES else "it has more"
            raise ConfigError.bad_value(flag, str(path), f"{expected}: {found}")
        return cls(secret)

    def signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def has_signed(self, text: str, signature: str) -> bool:
        return hmac.compare_digest(self.signature(text).encode(), signature.encode())


def read_private_file(path: Path, setting: str, expected: str, max_bytes: int) -> bytes:
    """The first `max_bytes` bytes of a file. Raises ConfigError, naming `setting` and what is `expected`, for an
    unreadable file, one that is neither this user's nor root's, or that other users can read or write.
    """
    try:
        with path.open("rb") as file:
            state, content = os.fstat(file.fileno()), file.read(max_bytes)
    except OSError as error:
        raise ConfigError.bad_value(setting, str(path), f"{expected}: {error.strerror}") from None
    is_own = state.st_uid == os.geteuid()
    # A secret that root mounts into a container is readable by its group, a supplementary one of root.
    is_mounted = state.st_uid == 0 and (not is_own or state.st_gid in {*os.getgroups()} - {os.getegid()})
    if not (is_own or is_mounted) or stat.S_IMODE(state.st_mode) & (0o037 if is_mounted else 0o077):
        found = f"its mode is {stat.S_IMODE(state.st_mode):04o}, its owner uid {state.st_uid}"
        raise ConfigError.bad_value(setting, str(path), f"{expected}: {found}")
    return content
