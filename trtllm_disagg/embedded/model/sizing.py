"""How long a sequence may be, how many KV blocks there are, and what they look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trtllm_disagg.embedded.model.model_loader import ModelShape
from trtllm_disagg.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.kv_transfer.base import KvLayout


def choose_device(wanted: str, num_ranks: int = 1) -> torch.device:
    """`auto` is CUDA where torch sees it; several ranks run on the CPU."""
    if num_ranks > 1:
        return torch.device("cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError.bad_value("embedded.device", wanted, "cpu; torch sees no CUDA device here")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def max_seq_len(args: LlmArgs, shape: ModelShape) -> int:
    """Tokens of prompt and answer together."""
    if args.max_seq_len is None:
        return shape.config.max_position_embeddings
    if args.max_seq_len > shape.config.max_position_embeddings:
        raise ConfigError.bad_value(
            "max_seq_len",
            args.max_seq_len,
            f"at most the model's max_position_embeddings {shape.config.max_position_embeddings}",
        )
    return args.max_seq_len


#: Of the longest kind; how many a pool of unstated size holds at most. A small model needs no gigabytes.
_DEFAULT_SEQUENCES = 32


def num_kv_blocks(args: LlmArgs, shape: ModelShape, device: torch.device) -> int:
    """From kv_cache_config.max_tokens; else from a fraction of the memory that is free now, up to what 32 of the
    longest sequences take. It never grows.
    """
    size = args.kv_cache_config.tokens_per_block
    _require_memory(args, shape, device)
    blocks = (args.kv_cache_config.max_tokens or _default_tokens(args, shape, device)) // size
    if blocks < 1:
        raise _too_small(args, size)
    return blocks


def _require_memory(args: LlmArgs, shape: ModelShape, device: torch.device) -> None:
    """Raises ConfigError for a stated size that there is no memory for."""
    wanted = args.kv_cache_config.max_tokens
    free = available_bytes() if device.type == "cpu" else _free_bytes(args, device)
    if wanted is not None and wanted > free // _token_bytes(shape):
        raise ConfigError.bad_value(
            "kv_cache_config.max_tokens",
            wanted,
            f"at most {free // _token_bytes(shape)}: a KV token of this model takes {_token_bytes(shape)} bytes, and "
            f"{free >> 20} MiB are free",
        )


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
    affordable = int(_free_bytes(args, device) * (0.9 if fraction is None else fraction)) // _token_bytes(
        shape
    )
    return min(affordable, _DEFAULT_SEQUENCES * max_seq_len(args, shape))


def _token_bytes(shape: ModelShape) -> int:
    return (
        2
        * shape.config.num_hidden_layers
        * shape.config.num_key_value_heads
        * shape.config.head_dim
        * shape.dtype.itemsize
    )


def _free_bytes(args: LlmArgs, device: torch.device) -> int:
    """What will be free on the device once the weights are there. On a CPU a tenth of what is free: it is shared
    with other processes.
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
    return PoolShape(dimensions, shape.dtype, device)


def kv_layout(shape: ModelShape, tokens_per_block: int) -> KvLayout:
    """What another engine's pool must have in common with this one's."""
    return KvLayout(
        model=shape.fingerprint,
        num_layers=shape.config.num_hidden_layers,
        tokens_per_block=tokens_per_block,
        num_kv_heads=shape.config.num_key_value_heads,
        head_dim=shape.config.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
    )


def available_bytes() -> int:
    """Memory that could be taken without swapping; the page cache counts as available."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024
