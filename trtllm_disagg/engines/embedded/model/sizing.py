"""How many KV blocks there are, and what they look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_shape import (
    ModelShape,
    available_bytes,
    max_seq_len,
    require_memory,
)
from trtllm_disagg.errors import ConfigError


def choose_device(wanted: str, num_ranks: int = 1) -> torch.device:
    """`auto` is CUDA where torch sees it; several ranks run on the CPU."""
    if num_ranks > 1:
        return torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError.bad_value("embedded.device", wanted, "cpu; torch sees no CUDA device here")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


#: A pool of unstated size holds at most this many sequences of max_seq_len: a small model needs no gigabytes.
_DEFAULT_SEQUENCES = 32


def num_kv_blocks(args: LlmArgs, shape: ModelShape, device: torch.device) -> int:
    """The pool's blocks: of kv_cache_config.max_tokens; else of a fraction of the memory that is free now, up to
    what 32 of the longest sequences take. It never grows.
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
    """Tokens of prompt and answer together: as many as the model and its arguments allow, and the pool holds."""
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
        f"more: with the memory that is free now there is no room for one block of {size} tokens",
    )


def _default_tokens(args: LlmArgs, shape: ModelShape, device: torch.device) -> int:
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    affordable = (
        int(_bytes_for_the_pool(args, device) * (0.9 if fraction is None else fraction)) // shape.token_bytes
    )
    return min(affordable, _DEFAULT_SEQUENCES * max_seq_len(args, shape))


def _bytes_for_the_pool(args: LlmArgs, device: torch.device) -> int:
    """What will be free on a GPU once the weights are there; a tenth of what is free for a CPU, since other processes
    share that.
    """
    if device.type == "cpu":
        return available_bytes() // 10
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    return max(0, torch.cuda.mem_get_info(device)[0] - weights)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """`kv[block, layer, k|v, slot, head, dim]`, wherever its memory comes from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_blocks(self) -> int:
        return self.shape[0]


def new_pool(
    shape: ModelShape, num_blocks: int, tokens_per_block: int, device: torch.device, num_ranks: int = 1
) -> PoolShape:
    """Each rank's pool has as many blocks, with its part of the KV heads."""
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
    """What another engine's pool must have in common with this one's."""
    return KvLayout(
        model=shape.fingerprint,
        num_layers=shape.config.num_hidden_layers,
        tokens_per_block=tokens_per_block,
        num_kv_heads=shape.config.num_key_value_heads,
        head_dim=shape.config.head_dim,
        dtype=shape.dtype,
    )
