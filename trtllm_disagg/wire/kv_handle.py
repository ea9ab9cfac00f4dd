"""The handle in `DisaggregatedParams.opaque_state`: the engine that holds the KV, its prompt, its blocks.

It comes from the network, so decoding validates and bounds it. It proves nothing: the sender compares it with its lease
before the receiver uses what it read (`kv_transfer/pull.py`). Its `endpoint` is the sender's control channel, a socket
file: unix:///PATH. TensorRT-LLM's engines have other handles, and endpoints tcp://HOST:PORT.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

import msgspec

from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.types import BlockId, Number63

EXPECTED = "tcp://HOST:PORT or unix:///PATH"

_ENDPOINT = re.compile(
    r"tcp://(\[[0-9a-fA-F:]+\]|[0-9A-Za-z._-]+):(\d{1,5})|unix://((?:/[0-9A-Za-z._-]+){1,16})", re.ASCII
)
#: The port for a path, in protocols that name host and port.
_NO_PORT = 1
_MAX_LENGTH = 256
VERSION = 1
MAX_BLOCKS = 1 << 20
MAX_BYTES = 16 << 20
#: Errors of msgspec for bytes that are no message. ValueError: a string is not UTF-8.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_encoder = msgspec.msgpack.Encoder()


def is_endpoint(text: object) -> bool:
    """Whether `text`, perhaps from the network, is a valid endpoint."""
    return isinstance(text, str) and split_endpoint(text) is not None


def split_endpoint(text: str) -> tuple[str, int] | None:
    """(host, port), IPv6 without brackets, or (a socket's path, 1); None for other texts."""
    match = _ENDPOINT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return None
    if match[3]:
        return match[3], _NO_PORT
    return (match[1].strip("[]"), int(match[2])) if 0 < int(match[2]) < 1 << 16 else None


def join_endpoint(host: str, port: int) -> str:
    """The inverse of `split_endpoint`."""
    if host.startswith("/"):
        return f"unix://{host}"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def socket_path(endpoint: str) -> str | None:
    """The path of a socket-file endpoint. Before connecting, check that it is this user's (`ipc/sockets.py`)."""
    place = split_endpoint(endpoint)
    return place[0] if place is not None and place[0].startswith("/") else None


class KvHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    #: Unique name of the sending engine process; a restart changes it.
    sender: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    #: The sender's control channel.
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    lease: Digest
    layout: Digest
    prompt: Digest
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]
    blocks: Annotated[list[BlockId], msgspec.Meta(max_length=MAX_BLOCKS)]
    #: The seed of the first token, and of the later ones.
    seed: Number63
    #: Prompt tokens that prefill had cached (for the answer's usage).
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0

    def encode(self) -> bytes:
        return _encoder.encode(self)

    def digest(self) -> bytes:
        """A hash of all fields, which the sender compares with its lease's."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


_decoder = msgspec.msgpack.Decoder(KvHandle)


def decode_handle(opaque_state: bytes) -> KvHandle:
    """Raises HandoffRefusedError unless the bytes are a handle of this version."""
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
    if socket_path(handle.endpoint) is None:
        raise HandoffRefusedError(f"handoff names endpoint {handle.endpoint!r}; expected unix:///PATH")
    return handle
