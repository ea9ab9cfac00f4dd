"""Follows the engine's KV events to know how much of a prompt is in its prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

#: Identifies a block: (hash of the previous block, or the first block's cache salt; its tokens as bytes).
_Key = tuple[int | str, bytes]


def packed_blocks(tokens: Sequence[int], size: int) -> Iterator[bytes]:
    """The full blocks of `size` tokens, 8 bytes per token."""
    packed, width = array("q", tokens).tobytes(), size * 8
    return (packed[at : at + width] for at in range(0, len(packed) - width + 1, width))


class CachedPrefix:
    """The blocks in a prefix cache, kept up to date by KV events. A lookup takes O(blocks of the prompt)."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._hashes: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Cached tokens at the prompt's start. The last token never counts: its logits must be computed."""
        count = 0
        before: int | str = salt or ""
        for block in packed_blocks(tokens, self._size):
            found = self._hashes.get((before, block))
            if found is None:
                break
            before, count = found, count + self._size
        return min(count, len(tokens) - 1)

    # -- called by `dynamo_runtime.publishers`

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
        block_mm_infos: Sequence[Any] | None = None,
    ) -> None:
        before: int | str = parent_hash if parent_hash is not None else cache_salt or ""
        images = block_mm_infos or [None] * len(block_hashes)
        for block, block_hash, image in zip(
            packed_blocks(token_ids, self._size), block_hashes, images, strict=True
        ):
            self._forget(block_hash)
            if image is None:  # tokens do not say which image they are of
                self._hashes[before, block] = block_hash
                self._keys[block_hash] = before, block
            before = block_hash

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block_hash in block_hashes:
            self._forget(block_hash)

    def clear(self) -> None:
        """Events were lost: treat every block as uncached until it is stored again."""
        self._hashes.clear()
        self._keys.clear()

    def _forget(self, block_hash: int) -> None:
        key = self._keys.pop(block_hash, None)
        if key is not None and self._hashes.get(key) == block_hash:
            del self._hashes[key]


class CachedPrefixes:
    """A `CachedPrefix` per attention-DP rank: one rank may drop a block that others keep."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._ranks = [CachedPrefix(block_size)]

    def of_rank(self, rank: int) -> CachedPrefix:
        while len(self._ranks) <= rank:
            self._ranks.append(CachedPrefix(self.block_size))
        return self._ranks[rank]

    def num_cached(self, tokens: Sequence[int], salt: str | None = None, rank: int | None = None) -> int:
        """Cached tokens on the request's rank; on the best rank while the engine has not chosen one."""
        chosen = self._ranks if rank is None or rank >= len(self._ranks) else [self._ranks[rank]]
        return max(each.num_cached(tokens, salt) for each in chosen)
