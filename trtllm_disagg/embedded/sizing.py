"""How long a sequence may be and how many KV blocks there are."""

from __future__ import annotations

from trtllm_disagg.embedded.llm_args import LlmArgs
from trtllm_disagg.embedded.model_loader import ModelShape
from trtllm_disagg.errors import ConfigError


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


def num_kv_blocks(args: LlmArgs, shape: ModelShape) -> int:
    """From kv_cache_config.max_tokens, or from a fraction of the memory that is free now. It never grows."""
    config = args.kv_cache_config
    size = config.tokens_per_block
    if config.max_tokens is not None:
        blocks = config.max_tokens // size
    else:
        block_bytes = 2 * shape.num_layers * size * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        fraction = config.free_gpu_memory_fraction
        # On a CPU "free memory" is shared with everybody else, so a tenth of what was asked for a GPU.
        blocks = int(_available_bytes() * (fraction if fraction is not None else 0.9) / 10) // block_bytes
    if blocks < 1:
        raise ConfigError(f"kv_cache_config: room for {blocks} blocks of {size} tokens; at least 1 is needed")
    return blocks


def _available_bytes() -> int:
    """Memory that could be taken without swapping; the page cache counts as available."""
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024
