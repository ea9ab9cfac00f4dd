"""The handle inside `DisaggregatedParams.opaque_state`: which engine holds the KV of which prompt, in which blocks.

It comes from the network, so decoding validates and bounds it. It proves nothing by itself: the sender compares it
with its own lease before the receiver may use what it read (`control.py`). Its `endpoint` is the sender's control
channel: unix://@NAME:NUMBER on one host, tcp://HOST:PORT between hosts.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

import msgspec

from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.types import BlockId, Number63

TCP, UNIX = "tcp", "unix"
EXPECTED = "tcp://HOST:PORT or unix://@NAME:NUMBER"

_ENDPOINT = re.compile(
    r"(?:tcp://(\[[0-9a-fA-F:]+\]|[0-9A-Za-z._-]+)|unix://(@[0-9A-Za-z.-]{1,64})):(\d{1,5})", re.ASCII
)
_MAX_LENGTH = 256
VERSION = 1
MAX_BLOCKS = 1 << 20
MAX_BYTES = 16 << 20
#: Errors of msgspec for bytes that are not a message. ValueError: a string in them is not UTF-8.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_encoder = msgspec.msgpack.Encoder()


def is_endpoint(text: object) -> bool:
    """True for a valid endpoint; `text` may come from the network."""
    return isinstance(text, str) and split_endpoint(text) is not None


def scheme_of(endpoint: str) -> str:
    return endpoint.partition("://")[0]


def split_endpoint(text: str) -> tuple[str, int] | None:
    """(host, port), an IPv6 address without its brackets, a Unix socket's name with its @; None for
    text that is not an endpoint.
    """
    match = _ENDPOINT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or not 0 < int(match[3]) < 1 << 16:
        return None
    return (match[1] or match[2]).strip("[]"), int(match[3])


def join_endpoint(host: str, port: int) -> str:
    """The inverse of `split_endpoint`."""
    if host.startswith("@"):
        return f"{UNIX}://{host}:{port}"
    return f"{TCP}://[{host}]:{port}" if ":" in host else f"{TCP}://{host}:{port}"


class KvHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    #: Unique name of the sending engine process; a restarted one has another.
    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    #: Where the sender's control channel listens.
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    lease: Digest
    layout: Digest
    prompt: Digest
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    blocks: Annotated[list[BlockId], msgspec.Meta(max_length=MAX_BLOCKS)]
    #: The seed that the first token was drawn with; the rest of the answer uses it too.
    seed: Number63
    #: Prompt tokens that prefill found in its own cache (for the answer's usage).
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0

    def encode(self) -> bytes:
        return _encoder.encode(self)

    def digest(self) -> bytes:
        """A hash of all fields, which the sender compares with that of its lease."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


_decoder = msgspec.msgpack.Decoder(KvHandle)


def decode_handle(opaque_state: bytes) -> KvHandle:
    """Raise HandoffRefusedError when the bytes are not a handle of this version."""
    if len(opaque_state) > MAX_BYTES:
        raise HandoffRefusedError(f"handoff of {len(opaque_state)} bytes; at most {MAX_BYTES} are accepted")
    try:
        handle = _decoder.decode(opaque_state)
    except UNREADABLE as error:
        raise HandoffRefusedError(f"handoff is not readable: {error}") from None
    if handle.version != VERSION:
        raise HandoffRefusedError(
            f"handoff has version {handle.version}; this worker speaks version {VERSION}"
        )
    if not is_endpoint(handle.endpoint):
        raise HandoffRefusedError(f"handoff names endpoint {handle.endpoint!r}; expected {EXPECTED}")
    return handle
