"""The KV memory of an engine: the pool that attention uses, copies of its blocks, and its size."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import torch

from trtllm_disagg.engines.embedded.kv_cache.memory import CopyStart, Drop, KvCommand, Restore, Save
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_shape import (
    ModelShape,
    available_bytes,
    max_seq_len,
    require_memory,
)
from trtllm_disagg.errors import ConfigError


class KvPool:
    """The KV memory of an engine: `kv[block, layer, k|v, slot, head, dim]`, so a block moves as one range of bytes.
    Saved copies of blocks are in main memory.

    In the view `rows` (rows, head, dim), a token's *place* is the row of its key in the first layer; `key_row` and
    `value_row` are a layer's offsets from it.
    """

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        _, num_layers, _, self.tokens_per_block, num_heads, head_dim = kv.shape
        self.rows_per_block = 2 * num_layers * self.tokens_per_block
        self.rows = kv.view(-1, num_heads, head_dim)
        #: K or V of a block in a layer.
        self._parts = kv.view(-1, self.tokens_per_block, num_heads, head_dim)
        self._parts_per_block = 2 * num_layers
        #: By slot.
        self.saved: dict[int, torch.Tensor] = {}

    def key_row(self, layer: int) -> int:
        return 2 * layer * self.tokens_per_block

    def value_row(self, layer: int) -> int:
        return self.key_row(layer) + self.tokens_per_block

    def keys_and_values(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V of these blocks (int64), concatenated: copies (tokens, heads, dim)."""
        first = blocks * self._parts_per_block + 2 * layer
        keys, values = (self._parts.index_select(0, first + kind).flatten(0, 1) for kind in (0, 1))
        return keys, values

    @torch.inference_mode()
    def apply(self, command: KvCommand) -> None:
        match command:
            case CopyStart(source, target, num_tokens):
                self.kv[target, :, :, :num_tokens] = self.kv[source, :, :, :num_tokens]
            case Save(slot, blocks):
                self.saved[slot] = self.kv.index_select(0, self._index(blocks)).cpu()
            case Restore(slot, first, blocks):
                saved = self.saved[slot][first : first + len(blocks)].to(self.kv.device)
                self.kv.index_copy_(0, self._index(blocks[: len(saved)]), saved)
            case Drop(slot):
                del self.saved[slot]

    def _index(self, blocks: Seq[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=self.kv.device)


def choose_device(wanted: str, num_ranks: int = 1) -> torch.device:
    """`auto` is CUDA if torch sees it; several ranks run on the CPU."""
    if num_ranks > 1:
        return torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError.bad_value("embedded.device", wanted, "cpu; torch sees no CUDA device here")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


#: By default a pool holds at most this many sequences of max_seq_len: a small model needs no gigabytes.
_DEFAULT_SEQUENCES = 32


def num_kv_blocks(args: LlmArgs, shape: ModelShape, device: torch.device) -> int:
    """The pool's blocks: kv_cache_config.max_tokens, else a fraction of the free memory, for at most 32 of the
    longest sequences.
    """
    size = args.kv_cache_config.tokens_per_block
    require_memory(
        args, shape, available_bytes() if device.type == "cpu" else _bytes_for_the_pool(args, device)
    )
    blocks = (args.kv_cache_config.max_tokens or _default_tokens(args, shape, device)) // size
    if blocks < 1:
        raise _too_small(args, size)
    return blocks


def longest_sequence(args: LlmArgs, shape: ModelShape, num_blocks: int) -> int:
    """Maximum tokens of prompt and answer together, by the model, its arguments and the pool."""
    return min(max_seq_len(args, shape), num_blocks * args.kv_cache_config.tokens_per_block)


def _too_small(args: LlmArgs, size: int) -> ConfigError:
    config = args.kv_cache_config
    if config.max_tokens is not None:
        return ConfigError.bad_value(
            "kv_cache_config.max_tokens", config.max_tokens, f"at least one block of tokens_per_block {size}"
        )
    return ConfigError.bad_value(
        "kv_cache_config.free_gpu_memory_fraction",
        config.free_gpu_memory_fraction,
        f"more: the free memory has no room for one block of {size} tokens",
    )


def _default_tokens(args: LlmArgs, shape: ModelShape, device: torch.device) -> int:
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    affordable = (
        int(_bytes_for_the_pool(args, device) * (0.9 if fraction is None else fraction)) // shape.token_bytes
    )
    return min(affordable, _DEFAULT_SEQUENCES * max_seq_len(args, shape))


def _bytes_for_the_pool(args: LlmArgs, device: torch.device) -> int:
    """On a GPU, the free bytes after loading the weights; on a CPU, a tenth of them, since other processes share it."""
    if device.type == "cpu":
        return available_bytes() // 10
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    return max(0, torch.cuda.mem_get_info(device)[0] - weights)


class PoolShape(NamedTuple):
    """`kv[block, layer, k|v, slot, head, dim]`, in any memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def new_pool(
    shape: ModelShape, num_blocks: int, tokens_per_block: int, device: torch.device, num_ranks: int = 1
) -> PoolShape:
    """Every rank's pool has the same number of blocks, with the rank's KV heads."""
    heads = shape.config.num_key_value_heads // num_ranks
    dimensions = (
        num_blocks,
        shape.config.num_hidden_layers,
        2,
        tokens_per_block,
        heads,
        shape.config.head_dim,
    )
    return PoolShape(dimensions, shape.torch_dtype, device)


def kv_layout(shape: ModelShape, tokens_per_block: int) -> KvLayout:
    """The properties that a peer's pool must share."""
    return KvLayout(
        model=shape.fingerprint,
        num_layers=shape.config.num_hidden_layers,
        tokens_per_block=tokens_per_block,
        num_kv_heads=shape.config.num_key_value_heads,
        head_dim=shape.config.head_dim,
        dtype=shape.dtype,
    )
