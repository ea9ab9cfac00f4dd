"""The handle inside `DisaggregatedParams.opaque_state`: which engine holds the KV of which prompt, in which blocks.

It comes from the network, so decoding validates and bounds it. It proves nothing by itself: the sender
compares it with its own lease before the receiver may use what it read (`control.py`).
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.kv_transfer.endpoint import EXPECTED, is_endpoint

VERSION = 1
MAX_BLOCKS = 1 << 20
MAX_BYTES = 16 << 20
#: What msgspec raises for bytes that are no message. ValueError: a string in them is not UTF-8.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


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
    blocks: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=MAX_BLOCKS)
    ]
    #: The seed that the first token was drawn with; the rest of the answer goes on with it.
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    #: Prompt tokens that prefill found in its own cache (for the answer's usage).
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0

    def encode(self) -> bytes:
        return _encoder.encode(self)

    def digest(self) -> bytes:
        """What the sender confirms: every field is as it said."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()


_encoder = msgspec.msgpack.Encoder()
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
