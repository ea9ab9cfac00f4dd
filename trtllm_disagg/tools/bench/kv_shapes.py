"""The KV of one prompt, as `bench transfer` moves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_disagg.tools.bench.models import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, StagingTransport

#: Names in kv_transfer/transports.py. Importing that would load the engine for `--help`.
TRANSPORTS = ("NIXL", "SHARED_MEMORY")


@dataclass(frozen=True, slots=True)
class KvShape:
    """One prompt's KV, and pools with twice as many blocks as it needs."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    prompt_tokens: int = 4096
    tokens_per_block: int = 32

    @property
    def prompt_blocks(self) -> int:
        return -(-self.prompt_tokens // self.tokens_per_block)

    @property
    def pool_blocks(self) -> int:
        return 2 * self.prompt_blocks

    @property
    def block_bytes(self) -> int:
        """K and V of one block in all layers."""
        token = 2 * self.layers * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]
        return self.tokens_per_block * token

    @property
    def pool_bytes(self) -> int:
        return self.pool_blocks * self.block_bytes

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_blocks * self.block_bytes

    @property
    def layout(self) -> KvLayout:
        from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout

        return KvLayout("bench", self.layers, self.tokens_per_block, self.kv_heads, self.head_dim, self.dtype)

    def pool_of(self, transport: StagingTransport, device: str = "cpu") -> torch.Tensor:
        """(blocks, layers, K and V, tokens, heads, head dimension)"""
        import torch

        size = (self.pool_blocks, self.layers, 2, self.tokens_per_block, self.kv_heads, self.head_dim)
        return transport.allocate(size, getattr(torch, self.dtype), torch.device(device))

    def blocks(self, pattern: str, seed: int) -> list[int]:
        """`contiguous`: one run. `scattered`: no two neighbours in a row, the worst case of an allocator."""
        if pattern == "contiguous":
            start = self.prompt_blocks // 2
            return list(range(start, start + self.prompt_blocks))
        import numpy as np

        ids = np.arange(0, self.pool_blocks, 2) + np.random.default_rng(seed).integers(2)
        return [int(i) for i in np.random.default_rng(seed).permutation(ids)]

    def ranges(self, remote: list[int], local: list[int]) -> np.ndarray:
        """(n, 3) int64 rows (remote offset, local offset, bytes) in the pools, neighbours on both sides merged."""
        import numpy as np

        from trtllm_disagg.engines.embedded.kv_transfer.base import common_runs

        pairs = np.asarray(sorted(zip(remote, local, strict=True)), np.int64)
        runs = [(*pairs[start], length) for start, length in common_runs(pairs[:, 0], pairs[:, 1])]
        return np.asarray(runs, np.int64) * self.block_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        KvShape("8b-bf16", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),  # Llama-3.1-8B
        KvShape("0.5b-fp32", layers=24, kv_heads=2, head_dim=64, dtype="float32"),  # Qwen2.5-0.5B
    )
}
