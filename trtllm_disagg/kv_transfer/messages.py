"""What two engines say to each other on the control channel.

CONTEXT_FIRST: decode begins, reads and finishes under prefill's lease. GENERATION_FIRST: decode allocates its blocks
and offers them; prefill writes into them and gives notice. All of it comes from the network, so decoding validates and
bounds it.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

from trtllm_disagg.kv_transfer.handle import MAX_BLOCKS, Digest

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
RequestId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Block = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
#: An offer is void after at most this time.
MAX_OFFER_SECONDS = 3600.0
#: (token id, logprob, rank), the chosen token first.
_Logprobs = Annotated[list[tuple[int, float, int]], msgspec.Meta(max_length=1 << 16)]


class GetMetadata(msgspec.Struct, tag="card"):
    """Answered with the engine's PeerMetadata."""


class Begin(msgspec.Struct, tag="begin"):
    """Decode to prefill: I am about to read. "held" when I may; "late" when the lease has expired; else "gone"."""

    lease: bytes
    digest: bytes


class Finish(msgspec.Struct, tag="finish"):
    """Decode to prefill: I have read. Answered as Begin; the blocks are prefill's again."""

    lease: bytes
    digest: bytes


class Release(msgspec.Struct, tag="release"):
    """Decode to prefill: I shall not read."""

    lease: bytes


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="offer"):
    """Decode to prefill: write the prompt's KV into these blocks of mine. Only ids; the rest is in my metadata."""

    #: `disagg_request_id`, the same in both requests.
    request: RequestId
    #: Only an engine that has seen the offer can answer for it.
    ticket: Digest
    #: The prefill engine that is meant; a restarted one has another name.
    prefill: Name
    decode: Name
    #: Decode's control channel.
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    layout: Digest
    prompt: Digest
    #: The prompt's blocks, in order. The first `num_known` hold their KV already.
    blocks: Annotated[list[_Block], msgspec.Meta(min_length=1, max_length=MAX_BLOCKS)]
    num_known: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
    #: How long decode waits for notice, and prefill for the request.
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_OFFER_SECONDS)]


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Decode to prefill: I have given up. Answered "stopped" once nothing can be written any more."""

    prefill: Name
    request: RequestId
    ticket: Digest


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Decode to prefill: are you still at these? Answered with the tickets that it is not at."""

    prefill: Name
    tickets: Annotated[list[Digest], msgspec.Meta(max_length=1 << 14)]


class Notice(msgspec.Struct, frozen=True, tag="notice"):
    """Prefill to decode: all KV is in your blocks, and this is the first token."""

    ticket: Digest
    token: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    logprobs: _Logprobs | None
    #: The seed that the token was drawn with; the rest of the answer goes on with it.
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
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
    """Prefill to decode: was everything that I have read of your known blocks untouched until now?"""

    ticket: Digest


FromDecode = Offer | Withdraw | Watch
FromPrefill = Notice | Failure | StillOffered
Request = GetMetadata | Begin | Finish | Release | FromDecode | FromPrefill


def new_ticket() -> bytes:
    return secrets.token_bytes(16)
