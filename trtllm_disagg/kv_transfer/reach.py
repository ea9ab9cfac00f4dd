"""How far an engine's KV travels: to processes of the same user on this host, or to hosts that have the same key."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.kv_transfer.doors import Door, LocalDoor
from trtllm_disagg.kv_transfer.tls_door import KEY, TlsDoor, read_key

KEY_FILE_VARIABLE = "TRTLLM_DISAGG_TRANSFER_KEY_FILE"


@dataclass(frozen=True, slots=True)
class OneHost:
    """Nothing listens on a network."""

    def door(self) -> Door:
        return LocalDoor()


@dataclass(frozen=True, slots=True)
class Network:
    #: Of this machine; only there is listened.
    host: str
    key: bytes = field(repr=False)

    def door(self) -> Door:
        return TlsDoor(self.host, self.key)


Reach = OneHost | Network


def choose_reach(host: str, key_file: Path | None) -> Reach:
    """`host` is a loopback address for one host. Raises ConfigError for another one without a key that is fit."""
    if _is_loopback(host):
        return OneHost()
    named = key_file or os.environ.get(KEY_FILE_VARIABLE)
    if not named:
        raise ConfigError.bad_value(
            "embedded.transfer_host",
            host,
            f"a loopback address, or together with {KEY} (or {KEY_FILE_VARIABLE}): other hosts get KV only when they "
            "have the same key",
        )
    return Network(host, read_key(Path(named)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
