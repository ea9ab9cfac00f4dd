"""Builds a modelled engine's core from the arguments of LLM(...)."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trtllm_disagg.common.reports import Reporter
from trtllm_disagg.engines.embedded.connector.connector import KvConnector
from trtllm_disagg.engines.embedded.connector.two_sided import TwoSidedConnector, timeouts_of
from trtllm_disagg.engines.embedded.ipc.messages import Ready
from trtllm_disagg.engines.embedded.kv_cache.memory import KvCommand
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout
from trtllm_disagg.engines.embedded.scheduler.scheduler import Scheduler, create_blocks
from trtllm_disagg.engines.embedded.scheduler.statistics import IterationStats
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.engines.modelled.core import (
    Clock,
    ClockedModel,
    LinkCost,
    LinkTransport,
    ModelledCore,
    ScaledClock,
)
from trtllm_disagg.engines.modelled.step_times import Factors, StepPricer, StepTimes, StraightLines
from trtllm_disagg.engines.modelled.tables import (
    LONGEST_MEASURED_PROMPT,
    MAX_CONTEXT,
    PACKAGE,
    GpuFacts,
    open_tables,
    read_model_config,
)
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.core.core_process import CoreProcess


log = logging.getLogger(__name__)

#: Default without a table or `modelled`: 400 Gb/s.
_LINK_BYTES_PER_SECOND, _LINK_LATENCY = 50e9, 10e-6


class NoMemory:
    """Memory without KV: copies of blocks cost nothing."""

    def apply(self, command: KvCommand) -> None:
        """Does nothing: there is no KV."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of one engine, and their step times."""

    times: StepTimes
    facts: GpuFacts
    #: Number of GPUs that share one sequence's KV, and number of such groups, each with its own requests.
    kv_gpus: int
    num_ranks: int


def for_process(arguments: dict[str, Any], process: CoreProcess, reporter: Reporter) -> ModelledCore:
    args = ModelledArgs.model_validate(arguments)
    return build_core(args, process.wake, ScaledClock(args.modelled.time_scale))


def build_core(args: ModelledArgs, wake: Callable[[], None], clock: Clock) -> ModelledCore:
    """`wake` is called from other threads when a transfer has ended and `step` has work.

    Raises ConfigError for what no table covers.
    """
    own, kv_config = args.modelled, args.kv_cache_config
    if own.measured is None or own.model is not None:
        require_tables()
    gpus = open_gpus(args)
    raw = read_model_config(args)
    size = kv_config.tokens_per_block
    num_blocks = num_kv_blocks(args, gpus)
    longest = _max_seq_len(args, raw, num_blocks * size)
    blocks = create_blocks(kv_config, num_blocks, longest)
    block_bytes = gpus.facts.kv_bytes_per_token * size * gpus.kv_gpus
    connector = _create_connector(args, gpus, raw, num_blocks, block_bytes, wake, clock)
    model = ClockedModel(
        StepPricer(gpus.times, gpus.num_ranks), Factors(own.prefill_factor, own.decode_factor), clock
    )
    ready = Ready(
        num_blocks=num_blocks,
        tokens_per_block=size,
        # The tokenizer's vocabulary, which may not be the modelled model's.
        vocab_size=_tokenizers_vocabulary(args),
        max_seq_len=longest,
        transport=connector.transport,
        # No token ends an answer: every answer has its maximum length.
        end_ids=[],
        endpoint=connector.endpoint,
        pids=[os.getpid()],
        is_exact=True,
    )
    _report(args, gpus, num_blocks)
    return ModelledCore(
        ready=ready,
        blocks=blocks,
        scheduler=Scheduler(args, blocks, NoMemory(), size),
        connector=connector,
        model=model,
        guides=None,
        stats=IterationStats(args),
        block_bytes=block_bytes,
        clock=clock.now,
        time_scale=own.time_scale,
    )


def require_tables() -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "modelled: the tables of GPUs' step times are not installed: pip install 'trtllm-disagg[modelled]' "
            "(or give your own step times: modelled.measured in the engine YAML, without modelled.model)"
        )


def open_gpus(args: ModelledArgs) -> Gpus:
    """Raises ConfigError for what no table covers."""
    own, ranks = args.modelled, args.tensor_parallel_size
    kv_gpus, num_ranks = (1, ranks) if args.enable_attention_dp else (ranks, 1)
    if (measured := own.measured) is not None:
        facts = GpuFacts(
            measured.kv_pool_tokens // num_ranks // args.kv_cache_config.tokens_per_block,
            -(-measured.kv_bytes_per_token // kv_gpus),
            _LINK_BYTES_PER_SECOND,
            _LINK_LATENCY,
        )
        times: StepTimes = StraightLines(measured)
    else:
        require_tables()
        times, facts = open_tables(args)
    if own.link_gb_per_second is not None:
        facts = replace(facts, link_bytes_per_second=own.link_gb_per_second * 1e9)
    if own.link_latency_us is not None:
        facts = replace(facts, link_latency=own.link_latency_us / 1e6)
    return Gpus(times, facts, kv_gpus, num_ranks)


def num_kv_blocks(args: ModelledArgs, gpus: Gpus) -> int:
    """The smaller of the tables' pool and kv_cache_config.max_tokens, in blocks."""
    there, size = gpus.facts.kv_blocks * gpus.num_ranks, args.kv_cache_config.tokens_per_block
    wanted = args.kv_cache_config.max_tokens
    blocks = there if wanted is None else min(there, wanted // size)
    if blocks < 1:
        raise ConfigError.bad_value(
            "kv_cache_config.max_tokens",
            wanted,
            f"at least one block of {size} tokens; the GPUs have {there} blocks",
        )
    return blocks


def _max_seq_len(args: ModelledArgs, raw: dict[str, Any], pool_tokens: int) -> int:
    """Maximum tokens of prompt and answer together."""
    positions = min(int(raw.get("max_position_embeddings") or MAX_CONTEXT), MAX_CONTEXT)
    if args.max_seq_len is not None and args.max_seq_len > positions:
        raise ConfigError.bad_value(
            "max_seq_len", args.max_seq_len, f"at most the modelled model's {positions}"
        )
    return min(args.max_seq_len or positions, pool_tokens)


def _create_connector(
    args: ModelledArgs,
    gpus: Gpus,
    raw: dict[str, Any],
    num_blocks: int,
    block_bytes: int,
    wake: Callable[[], None],
    clock: Clock,
) -> KvConnector:
    config, own = args.cache_transceiver_config, args.modelled
    if config is None or config.backend is None:
        return KvConnector()
    size, facts = args.kv_cache_config.tokens_per_block, gpus.facts
    cost = LinkCost(
        # Each GPU sends its part; the links of ranks with their own requests count as one.
        facts.kv_bytes_per_token * size / facts.link_bytes_per_second / gpus.num_ranks,
        facts.link_latency,
        own.time_scale,
    )
    layout = KvLayout(
        model=f"modelled {own.model or raw.get('model_type')}",
        num_layers=int(raw.get("num_hidden_layers") or 0),
        tokens_per_block=size,
        num_kv_heads=int(raw.get("num_key_value_heads") or 0),
        head_dim=int(raw.get("head_dim") or 0),
        dtype=args.kv_cache_config.dtype,
    )
    timeouts = timeouts_of(config)
    return TwoSidedConnector(
        LinkTransport(cost, block_bytes, clock),
        layout,
        num_blocks,
        timeouts=replace(timeouts, transfer=timeouts.transfer * own.time_scale),
        takes_offers=True,
        wake=wake,
    )


def _tokenizers_vocabulary(args: ModelledArgs) -> int:
    raw = read_model_config(
        args.model_copy(update={"modelled": args.modelled.model_copy(update={"model": None})})
    )
    return int(raw["vocab_size"])


def _report(args: ModelledArgs, gpus: Gpus, num_blocks: int) -> None:
    own = args.modelled
    source = (
        "measured steps"
        if own.measured
        else f"the tables of {own.system}, TensorRT-LLM {own.backend_version}"
    )
    log.warning(
        "this engine SIMULATES %s on %d GPUs by %s: step times and KV transfers are modelled, ignore the tokens",
        own.model or args.model,
        args.tensor_parallel_size,
        source,
    )
    log.info(
        "modelled: %d KV blocks, links of %.4g GB/s per GPU, clock %g times slower",
        num_blocks,
        gpus.facts.link_bytes_per_second / 1e9,
        own.time_scale,
    )
    if own.measured is None and (args.max_seq_len or MAX_CONTEXT) > LONGEST_MEASURED_PROMPT:
        log.info(
            "modelled: the tables' library extrapolates prefill attention beyond %d tokens",
            LONGEST_MEASURED_PROMPT,
        )
