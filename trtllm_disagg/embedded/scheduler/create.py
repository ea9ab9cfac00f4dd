"""The scheduler and its blocks, as the arguments of LLM(...) ask for: every policy is chosen here, once."""

from __future__ import annotations

from trtllm_disagg.embedded.kv_cache.block_manager import BlockManager, KvEventLog
from trtllm_disagg.embedded.kv_cache.memory import KvMemory, SwapSpace
from trtllm_disagg.embedded.kv_cache.partial_reuse import create_partial_reuse
from trtllm_disagg.embedded.params.llm_args import KvCacheConfig, LlmArgs
from trtllm_disagg.embedded.scheduler.capacity import Reservations, create_capacity
from trtllm_disagg.embedded.scheduler.chunking import create_chunking
from trtllm_disagg.embedded.scheduler.scheduler import Scheduler
from trtllm_disagg.errors import ConfigError

#: Of the pool, what may be put aside when `embedded.swap_tokens` does not say.
_DEFAULT_SWAP = 1 / 4


def create_blocks(config: KvCacheConfig, num_blocks: int, events: KvEventLog) -> BlockManager:
    return BlockManager(
        num_blocks,
        config.tokens_per_block,
        enable_reuse=config.enable_block_reuse,
        enable_partial_reuse=config.enable_partial_reuse,
        events=events,
    )


def create_scheduler(args: LlmArgs, blocks: BlockManager, memory: KvMemory, alignment: int) -> Scheduler:
    """`alignment`: where a prefill chunk may end, in tokens from the prompt's start. Raises ConfigError when a step
    is shorter than that.
    """
    if args.max_num_tokens < alignment:
        raise ConfigError.bad_value("max_num_tokens", args.max_num_tokens, f"at least {alignment}")
    size = blocks.tokens_per_block
    swap = SwapSpace(memory, _swap_blocks(args, blocks), size)
    partial = create_partial_reuse(args.kv_cache_config, blocks, memory)
    return Scheduler(
        Reservations(blocks, partial, swap),
        create_capacity(args, blocks),
        create_chunking(args, alignment),
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        by_priority=args.scheduler_config.waiting_queue_policy == "priority",
    )


def _swap_blocks(args: LlmArgs, blocks: BlockManager) -> int:
    tokens = args.embedded.swap_tokens
    return int(blocks.num_blocks * _DEFAULT_SWAP) if tokens is None else tokens // blocks.tokens_per_block
