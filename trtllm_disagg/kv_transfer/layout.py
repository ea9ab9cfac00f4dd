"""What two KV pools must have in common before one may read the other's blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from trtllm_disagg.errors import HandoffRefusedError


class KvLayout(msgspec.Struct, frozen=True):
    """Shape of a pool without its number of blocks, which may differ."""

    model: str
    num_layers: int
    tokens_per_block: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    #: Of the pool's dimensions. In another one every number could be the same.
    order: str = "block, layer, k|v, slot, head, dim"

    def fingerprint(self) -> bytes:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    def require_same(self, other: KvLayout) -> None:
        """Raise HandoffRefusedError with one line per differing field."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        differing = [
            f"{key}: prefill {theirs[key]!r}, decode {mine[key]!r}"
            for key in mine
            if mine[key] != theirs[key]
        ]
        if differing:
            raise HandoffRefusedError("prefill and decode KV do not fit together: " + "; ".join(differing))


def prompt_digest(prompt: Sequence[int], cache_salt: str) -> bytes:
    """Binds a handoff to its prompt: 16 bytes over the token ids and the cache salt."""
    # The salt at a fixed length, so that it cannot be mistaken for tokens.
    hasher = hashlib.blake2b(hashlib.blake2b(cache_salt.encode()).digest(), digest_size=16)
    hasher.update(b"".join(token.to_bytes(4, "little") for token in prompt))
    return hasher.digest()
