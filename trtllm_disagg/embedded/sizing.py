"""How long a sequence may be, how many KV blocks there are, and what they look like."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_disagg.embedded.llm_args import LlmArgs
from trtllm_disagg.embedded.model_loader import ModelShape
from trtllm_disagg.embedded.sequence import Sequence
from trtllm_disagg.errors import ConfigError, InvalidRequestError
from trtllm_disagg.kv_transfer.layout import KvLayout


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
        return shape.max_positions
    if args.max_seq_len > shape.max_positions:
        raise ConfigError.bad_value(
            "max_seq_len",
            args.max_seq_len,
            f"at most the model's max_position_embeddings {shape.max_positions}",
        )
    return args.max_seq_len


#: Of the longest kind; how many a pool of unstated size holds at most. A small model needs no gigabytes.
_DEFAULT_SEQUENCES = 32


def num_kv_blocks(args: LlmArgs, shape: ModelShape) -> int:
    """From kv_cache_config.max_tokens; else from a fraction of the memory that is free now, up to what 32 of the
    longest sequences take. It never grows.
    """
    size = args.kv_cache_config.tokens_per_block
    blocks = (args.kv_cache_config.max_tokens or _default_tokens(args, shape)) // size
    if blocks < 1:
        raise ConfigError(f"kv_cache_config: room for {blocks} blocks of {size} tokens; at least 1 is needed")
    return blocks


def _default_tokens(args: LlmArgs, shape: ModelShape) -> int:
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    fraction = args.kv_cache_config.free_gpu_memory_fraction
    # On a CPU "free memory" is shared with everybody else, so a tenth of what was asked for a GPU.
    affordable = int(_available_bytes() * (0.9 if fraction is None else fraction) / 10) // token_bytes
    return min(affordable, _DEFAULT_SEQUENCES * max_seq_len(args, shape))


def require_room(sequence: Sequence, num_blocks: int, tokens_per_block: int) -> None:
    """Raise InvalidRequestError when the longest possible answer needs more blocks than there are."""
    wanted = -(-sequence.max_kv_tokens // tokens_per_block)
    if wanted > num_blocks:
        raise InvalidRequestError(
            f"the prompt ({sequence.num_prompt} tokens) and max_tokens ({sequence.sampling.max_tokens}) "
            f"need {wanted} KV blocks of {tokens_per_block} tokens; the pool has {num_blocks} "
            "(kv_cache_config.max_tokens)"
        )


@dataclass(frozen=True, slots=True)
class PoolShape:
    """`kv[layer, k|v, block, slot, head, dim]`, wherever its memory comes from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_blocks(self) -> int:
        return self.shape[2]


def new_pool(
    shape: ModelShape, num_blocks: int, tokens_per_block: int, device: torch.device, num_ranks: int = 1
) -> PoolShape:
    """Each rank's pool has as many blocks, with its part of the KV heads."""
    heads = shape.num_kv_heads // num_ranks
    dimensions = (shape.num_layers, 2, num_blocks, tokens_per_block, heads, shape.head_dim)
    return PoolShape(dimensions, shape.dtype, device)


def kv_layout(shape: ModelShape, tokens_per_block: int) -> KvLayout:
    """What another engine's pool must have in common with this one's."""
    return KvLayout(
        model=shape.fingerprint,
        num_layers=shape.num_layers,
        tokens_per_block=tokens_per_block,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(shape.dtype).removeprefix("torch."),
    )


def _available_bytes() -> int:
    """Memory that could be taken without swapping; the page cache counts as available."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024
