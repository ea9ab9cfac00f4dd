"""How much of a prompt this worker's engine has in its cache, from the engine's own cache events."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

#: (block before it, its tokens as bytes); the first block hangs on its salt.
_Key = tuple[int | str, bytes]


class CachedPrefix:
    """Hears of whole blocks as the KV router does, and answers in O(blocks of the prompt). As large as the pool."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._hashes: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Tokens from the start. The last one of a prompt is computed in any case: it gives the first logits."""
        count = 0
        before: int | str = salt or ""
        for block in self._blocks(tokens):
            found = self._hashes.get((before, block))
            if found is None:
                break
            before, count = found, count + self._size
        return min(count, len(tokens) - 1)

    # -- what `publisher.kv_events` tells

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        before: int | str = parent_hash if parent_hash is not None else cache_salt or ""
        for block, block_hash in zip(self._blocks(token_ids), block_hashes, strict=True):
            self._forget(block_hash)
            self._hashes[before, block] = block_hash
            self._keys[block_hash] = before, block
            before = block_hash

    def publish_removed(self, block_hashes: list[int]) -> None:
        for block_hash in block_hashes:
            self._forget(block_hash)

    def clear(self) -> None:
        """Events were lost: what is not known for sure counts as not cached until it is stored again."""
        self._hashes.clear()
        self._keys.clear()

    def _forget(self, block_hash: int) -> None:
        key = self._keys.pop(block_hash, None)
        if key is not None and self._hashes.get(key) == block_hash:
            del self._hashes[key]

    def _blocks(self, tokens: Sequence[int]) -> Iterator[bytes]:
        packed = array("q", tokens).tobytes()
        width = self._size * 8
        return (packed[at : at + width] for at in range(0, len(packed) - width + 1, width))
