"""Builds an embedded engine's core from the arguments of LLM(...)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtllm_disagg.common.reports import LOADING, Reporter
from trtllm_disagg.engines.embedded.connector.connector import KvConnector
from trtllm_disagg.engines.embedded.connector.two_sided import TwoSidedConnector, timeouts_of
from trtllm_disagg.engines.embedded.core.engine_core import EngineCore
from trtllm_disagg.engines.embedded.core.image_queue import ImageQueue
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.ipc.messages import Ready, SamplingSpec
from trtllm_disagg.engines.embedded.kv_cache.pool import (
    KvPool,
    PoolShape,
    choose_device,
    kv_layout,
    longest_sequence,
    new_pool,
    num_kv_blocks,
)
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import new_memory
from trtllm_disagg.engines.embedded.model.forward import ModelRunner, choose_forward, load_model
from trtllm_disagg.engines.embedded.model.rows import TILE, Sampled
from trtllm_disagg.engines.embedded.model.sampler import prompt_logprobs, sample
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_shape import ModelShape, max_seq_len, read_shape
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row, Scheduler, create_blocks
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.engines.embedded.scheduler.statistics import IterationStats
from trtllm_disagg.engines.embedded.tensor_parallel.group import OtherRank, use_cpus
from trtllm_disagg.engines.embedded.tensor_parallel.team import Runner, SingleRank, Team, open_team
from trtllm_disagg.engines.embedded.tensor_parallel.transfers import TeamTransport, transport_of
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.core.core_process import CoreProcess
    from trtllm_disagg.engines.embedded.model.guided_decoding import Guides
    from trtllm_disagg.engines.embedded.model.vision import VisionTower


log = logging.getLogger(__name__)


class SamplingModel:
    """A model's logits, and a draw from them."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self, rows: list[Row]) -> list[Sampled]:
        logits = self.runner.run(rows)
        sampling = [row.sequence for row in rows if row.samples]
        if any(row.num_scored for row in rows):
            return _with_prompts(logits, [row for row in rows if row.num_logits], sampling)
        if sampling:
            return sample(logits, sampling)
        if logits.is_cuda:
            # A transfer may move this step's KV at once, so wait for the device.
            torch.cuda.current_stream(logits.device).synchronize()
        return []

    def close(self) -> None:
        self.runner.close()


def _with_prompts(logits: torch.Tensor, rows: list[Row], sampling: list[Sequence]) -> list[Sampled]:
    ends = list(accumulate(row.num_logits for row in rows))
    last = [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]
    tokens = iter(sample(logits[last], sampling) if sampling else ())
    made = [next(tokens) if row.samples else Sampled(None, None) for row in rows]
    for row, end, one in zip(rows, ends, made, strict=True):
        if row.num_scored:
            count = row.sequence.sampling.prompt_logprobs or 0
            one.of_prompt = prompt_logprobs(logits[end - row.num_scored : end], row.scored(one.token), count)
    return made


def for_process(arguments: dict[str, Any], process: CoreProcess, reporter: Reporter) -> EngineCore:
    """The core for a process that is the engine or its rank 0."""
    args = LlmArgs.model_validate(arguments)
    team = open_team(args, process.fail)
    use_cpus(args, rank=0)
    return build_core(args, process.wake, team, reporter)


def build_core(
    args: LlmArgs,
    wake: Callable[[], None],
    team: SingleRank | Team | None = None,
    reporter: Reporter | None = None,
) -> EngineCore:
    """`wake` is called from other threads when a transfer has ended and `step` has work."""
    reporter = reporter or Reporter()
    team = team or SingleRank()
    device = choose_device(args.embedded.device, team.size)
    shape = read_shape(Path(args.model), args.dtype)
    plan = choose_forward(Path(args.model), args.embedded, shape, device, this_cpu())
    for remark in plan.remarks:
        log.info("%s", remark)
    kv_config = args.kv_cache_config
    size = kv_config.tokens_per_block
    num_blocks = num_kv_blocks(args, shape, device)
    longest, wanted_length = longest_sequence(args, shape, num_blocks), max_seq_len(args, shape)
    if longest < wanted_length:
        log.info("max_seq_len is %d, and not %d: the KV pool holds no more tokens", longest, wanted_length)
    blocks = create_blocks(kv_config, num_blocks, longest)
    team.start(plan.for_all_ranks(args), num_blocks)
    reporter.report(LOADING)
    model = load_model(Path(args.model), shape, plan.kind)
    tower = _load_tower(args, shape)
    team.shard(model)
    wanted = new_pool(shape, num_blocks, size, device, team.size)
    layout = kv_layout(shape, size)
    connector, kv = _create_connector(args, layout, wanted, wake, team.others)
    pool = KvPool(kv)
    scheduler = Scheduler(args, blocks, team.memory(pool), TILE)
    with plan.ops.reporting_compilation(reporter):
        forward = plan.make_forward(model, pool, longest, reporter)
        runner = team.broadcasting(ModelRunner(forward, pool, plan.ops))
        reporter.report("warming up")
        warm_up(runner, Path(args.model), num_blocks, size)
    ready = Ready(
        num_blocks=num_blocks,
        tokens_per_block=size,
        vocab_size=shape.config.vocab_size,
        max_seq_len=longest,
        transport=connector.transport,
        end_ids=shape.end_ids,
        endpoint=connector.endpoint,
        pids=team.pids,
        is_exact=plan.is_exact,
        image_tokens=shape.image_tokens,
    )
    return EngineCore(
        ready=ready,
        blocks=blocks,
        scheduler=scheduler,
        connector=connector,
        model=SamplingModel(runner),
        guides=_create_guides(args, shape),
        stats=IterationStats(args),
        block_bytes=kv.nbytes // num_blocks,
        images=ImageQueue(tower),
        close_last=team.close,
    )


def _load_tower(args: LlmArgs, shape: ModelShape) -> VisionTower | None:
    """Imports transformers' vision models only for a model that takes images."""
    if shape.image_tokens is None:
        return None
    from trtllm_disagg.engines.embedded.model.vision import load_tower

    return load_tower(Path(args.model), shape.image_tokens.num_tokens)


def _create_guides(args: LlmArgs, shape: ModelShape) -> Guides | None:
    """Imports the library for guided decoding only if the engine guides."""
    if args.guided_decoding_backend is None:
        return None
    from trtllm_disagg.engines.embedded.model.guided_decoding import Guides, read_guide_tokenizer

    tokenizer = read_guide_tokenizer(Path(args.tokenizer or args.model))
    return Guides(tokenizer, shape.config.vocab_size, shape.end_ids)


def _create_connector(
    args: LlmArgs,
    layout: KvLayout,
    pool: PoolShape,
    wake: Callable[[], None],
    others: Seq[OtherRank],
) -> tuple[KvConnector, torch.Tensor]:
    """The connector, and the pool in memory that the transport can serve. `others`: ranks with their own pools."""
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return KvConnector(), new_memory(*pool)
    team = TeamTransport(transport_of(config.backend, pool.device), others)
    kv = team.allocate(*pool)
    connector = TwoSidedConnector(
        team,
        layout,
        len(kv),
        timeouts=timeouts_of(config),
        takes_offers=args.tensor_parallel_size == 1,
        wake=wake,
    )
    return connector, kv


#: A prompt of one token, and one more token.
_POSITIONS = 2


def warm_up(runner: Runner, model: Path, num_blocks: int, tokens_per_block: int) -> None:
    """Run a prefill, a decode, and both in one step, in free blocks, so that no request waits for kernels to compile
    (seconds once per machine, 0.1 s later). Raises ConfigError if the logits are not finite.
    """
    each = -(-_POSITIONS // tokens_per_block)
    first, second = (_sequence(range(i * each, (i + 1) * each)) for i in range(2))
    steps = [[first], [first], [first, second]] if num_blocks >= 2 * each else [[first]]
    for sequences in steps:
        logits = runner.run([Row.of(sequence, 1) for sequence in sequences])
        if not torch.isfinite(logits).all():
            raise ConfigError(
                f"model: {model} gives logits that are not finite numbers; its weights are damaged, or too large for "
                'its dtype (try --override-engine-args \'{"dtype": "float32"}\')'
            )
        first.tokens, first.num_computed = [0, 0], 1


def _sequence(blocks: range) -> Sequence:
    return Sequence(
        request_id=0,
        index=0,
        request_type="context_and_generation",
        tokens=[0],
        num_prompt=1,
        sampling=SamplingSpec(max_tokens=_POSITIONS),
        seed=0,
        blocks=list(blocks),
    )
