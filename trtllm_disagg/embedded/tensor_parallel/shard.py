"""One rank's part of the model and of the KV pool, for the ranks that know nothing but steps."""

from __future__ import annotations

from pathlib import Path

import torch

from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.embedded.kv_cache.memory import KvPool, LocalKvMemory
from trtllm_disagg.embedded.model.forward_plan import choose_forward
from trtllm_disagg.embedded.model.model_loader import load_model, read_shape
from trtllm_disagg.embedded.model.model_runner import ModelRunner
from trtllm_disagg.embedded.model.sizing import PoolShape, choose_device, max_seq_len, new_pool
from trtllm_disagg.embedded.params.llm_args import LlmArgs
from trtllm_disagg.embedded.params.supported_args import scope_of
from trtllm_disagg.embedded.tensor_parallel.group import RankGroup
from trtllm_disagg.embedded.tensor_parallel.messages import CopyStart, Drop, RankCommand, Restore, Save, Step
from trtllm_disagg.embedded.tensor_parallel.sharding import shard_model
from trtllm_disagg.embedded.tensor_parallel.transfers import TransferService
from trtllm_disagg.kv_transfer.host import new_memory
from trtllm_disagg.kv_transfer.transports import create_transport, is_needed


class ShardOfEngine:
    """Does what rank 0 does, in the same order."""

    def __init__(self, runner: ModelRunner, memory: LocalKvMemory) -> None:
        self._runner = runner
        self._memory = memory

    def execute(self, command: RankCommand) -> None:
        match command:
            case Step():
                self._runner.run(command.rows)
            case CopyStart():
                self._memory.copy_start(command.source, command.target, command.num_tokens)
            case Save():
                self._memory.save(command.slot, command.blocks)
            case Restore():
                self._memory.restore(command.slot, command.first, command.blocks)
            case Drop():
                self._memory.drop(command.slot)


def build_shard(
    args: LlmArgs, num_blocks: int, group: RankGroup, transfers: TransferService
) -> ShardOfEngine:
    """As the engine core builds its own. Raises ConfigError like it."""
    device = choose_device(args.embedded.device, group.size)
    shape = read_shape(Path(args.model), args.dtype)
    plan = choose_forward(Path(args.model), args.embedded, shape, device, this_cpu())
    model = load_model(Path(args.model), shape, plan.kind)
    shard_model(model, group)
    size = args.kv_cache_config.tokens_per_block
    wanted = new_pool(shape, num_blocks, size, device, group.size)
    kv = _allocate(args, wanted, group, transfers)
    pool = KvPool(kv)
    forward = plan.make_forward(model, pool, max_seq_len(args, shape))
    return ShardOfEngine(ModelRunner(forward, pool, plan.ops), LocalKvMemory(kv))


def _allocate(args: LlmArgs, wanted: PoolShape, group: RankGroup, transfers: TransferService) -> torch.Tensor:
    """The pool, in memory that the transport can serve when there is one."""
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return new_memory(wanted.shape, wanted.dtype, wanted.device)
    scope = scope_of(args)
    transport = create_transport(config.backend, scope, needs_cma=is_needed(scope, wanted.device.type))
    pool = transport.allocate(wanted.shape, wanted.dtype, wanted.device)
    transfers.start(transport, pool, group.rank, group.size)
    return pool
