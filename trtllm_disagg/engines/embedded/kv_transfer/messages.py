"""The messages that two engines exchange on the control channel.

CONTEXT_FIRST: decode begins, reads and finishes under prefill's lease. GENERATION_FIRST: decode allocates its blocks
and offers them; prefill writes into them and sends a notice. All messages come from the network, so decoding validates
and bounds them.
"""

from __future__ import annotations

import secrets
from enum import Enum
from typing import Annotated

import msgspec

from trtllm_disagg.types import BlockId, Number63, TokenId
from trtllm_disagg.wire.kv_handle import MAX_BLOCKS, Digest

#: An offer is void after at most this time.
MAX_OFFER_SECONDS = 3600.0
#: (token id, logprob, rank), the chosen token first.
_Logprobs = Annotated[list[tuple[int, float, int]], msgspec.Meta(max_length=1 << 16)]


class Reply(bytes, Enum):
    """The one-word answers; only GetMetadata and Watch are answered with data."""

    OK = b"ok"
    #: The lease, or the offer, still holds.
    HELD = b"held"
    GONE = b"gone"
    #: The lease has expired, or was given back.
    LATE = b"late"
    #: The engine has no handler for this message.
    BAD = b"bad"
    UNFIT = b"unfit"
    WITHDRAWN = b"withdrawn"
    #: Of an offer: one with this disagg_request_id is there. Of a notice or a failure: decode has accepted it.
    TAKEN = b"taken"
    FULL = b"full"
    #: Prefill has abandoned the request.
    ABANDONED = b"left"
    STOPPED = b"stopped"
    BUSY = b"busy"


class GetMetadata(msgspec.Struct, tag="card"):
    """Decode or prefill asks for the other engine's PeerMetadata."""


class Begin(msgspec.Struct, tag="begin"):
    """Decode to prefill: I am about to read. Answered HELD when I may; LATE when the lease has expired; else GONE."""

    lease: bytes
    digest: bytes


class Finish(msgspec.Struct, tag="finish"):
    """Decode to prefill: I have read. Answered like Begin; the blocks are prefill's again."""

    lease: bytes
    digest: bytes


class Release(msgspec.Struct, tag="release"):
    """Decode to prefill: I shall not read."""

    lease: bytes


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Decode to prefill: write the prompt's KV into these blocks of mine. Only ids; the rest is in my metadata."""

    #: `disagg_request_id`, the same in both requests.
    request: Number63
    #: A secret: only an engine that has received the offer can answer for it.
    ticket: Digest
    #: Decode's control channel.
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    layout: Digest
    prompt: Digest
    #: The prompt's blocks, in order. The first `num_known` hold their KV already.
    blocks: Annotated[list[BlockId], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
    num_known: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    #: How long decode waits for the notice, and prefill for the request.
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_OFFER_SECONDS)]


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Decode to prefill: I have given up. Answered STOPPED once nothing can be written any more, and BUSY before."""

    request: Number63
    ticket: Digest


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Decode to prefill: do you still work on these? Answered with the tickets that prefill does not work on."""

    tickets: Annotated[list[Digest], msgspec.Meta(max_length=1 << 14)]


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Prefill to decode: all KV is in your blocks, and this is the first token."""

    ticket: Digest
    token: TokenId
    logprobs: _Logprobs | None
    #: The seed that the token was drawn with; the rest of the answer goes on with it.
    seed: Number63
    #: Prompt tokens that prefill did not have to compute.
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    bytes_moved: Annotated[int, msgspec.Meta(ge=0)]


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """Prefill to decode: there will be no notice."""

    ticket: Digest
    reason: Annotated[str, msgspec.Meta(max_length=4096)]
    #: Nothing can be written into the blocks any more.
    stopped: bool


class StillOffered(msgspec.Struct, frozen=True, tag="still-offered"):
    """Prefill to decode: were your known blocks, which I have read, unchanged until now? Answered HELD or GONE."""

    ticket: Digest


FromDecode = Offer | Withdraw | Watch
FromPrefill = Notice | Failure | StillOffered
Request = GetMetadata | Begin | Finish | Release | FromDecode | FromPrefill


def new_ticket() -> bytes:
    return secrets.token_bytes(16)
