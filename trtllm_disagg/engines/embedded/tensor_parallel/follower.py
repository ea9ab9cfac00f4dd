"""Every rank other than 0: loads a part of the model, then sleeps, and runs each step that rank 0 sends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

import msgspec
import torch

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.kv_cache.memory import CopyStart, Drop, Restore, Save
from trtllm_disagg.engines.embedded.kv_cache.pool import (
    KvPool,
    PoolShape,
    choose_device,
    longest_sequence,
    new_pool,
)
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import new_memory
from trtllm_disagg.engines.embedded.model.forward import ModelRunner, choose_forward, load_model
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.model_shape import read_shape
from trtllm_disagg.engines.embedded.tensor_parallel.group import (
    Broken,
    Build,
    Built,
    OtherRank,
    RankCommand,
    RankGroup,
    Step,
    Stop,
    join_as_follower,
    leave,
    use_cpus,
    watch,
)
from trtllm_disagg.engines.embedded.tensor_parallel.launch import IN_JOB, exit_with_parent
from trtllm_disagg.engines.embedded.tensor_parallel.team import shard_model
from trtllm_disagg.engines.embedded.tensor_parallel.transfers import TransferService, transport_of

log = logging.getLogger(__name__)

_commands = msgspec.msgpack.Decoder(RankCommand)


def serve_as_follower() -> int:
    """Run a rank in this process until rank 0 stops it or ends."""
    logging.basicConfig(level="INFO", format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    group, leader = join_as_follower()
    # Works even within an MPI call that never returns. Nothing here needs closing.
    watch(leader, _commands, lambda _last: os._exit(0))
    if IN_JOB in sys.argv:
        exit_with_parent()
    status = follow(group, leader)
    if status == 0 and IN_JOB in sys.argv:
        leave()
    return status


def follow(group: RankGroup, leader: OtherRank) -> int:
    """Serve as a rank from Build to Stop. Returns the exit status."""
    transfers = TransferService(leader.transfers)
    try:
        build = leader.commands.receive(_commands)
        assert isinstance(build, Build)
        runner = build_runner(build, group, transfers)
    except EOFError:
        return 1
    except Exception as error:
        transfers.fail(error)
        log.debug("rank %d cannot start", group.rank, exc_info=True)
        leader.commands.send(Broken(type(error).__name__, str(error)))
        _wait_for_end(leader)
        return 1
    transfers.executed()
    leader.commands.send(Built())
    while True:
        try:
            command = leader.commands.receive(_commands)
        except EOFError:
            return 1
        if isinstance(command, Stop):
            return 0
        try:
            _execute(runner, command)
        except Exception as error:
            log.exception("a step failed on rank %d", group.rank)
            leader.lifeline.send(Broken(type(error).__name__, str(error)))
            return 1
        transfers.executed()


def _wait_for_end(leader: OtherRank) -> None:
    """Let rank 0 read the error and end first: an earlier death would hide the cause."""
    with contextlib.suppress(EOFError, OSError):
        leader.commands.receive(_commands)


def _execute(runner: ModelRunner, command: RankCommand) -> None:
    """Do what rank 0 does, in the same order."""
    match command:
        case Step():
            runner.run(command.rows)
        case CopyStart() | Save() | Restore() | Drop():
            runner.pool.apply(command)


def build_runner(build: Build, group: RankGroup, transfers: TransferService) -> ModelRunner:
    """Build this rank's part as the engine core builds its own. Raises ConfigError like it."""
    args = LlmArgs.model_validate(build.args)
    use_cpus(args, group.rank)
    device = choose_device(args.embedded.device, group.size)
    shape = read_shape(Path(args.model), args.dtype)
    plan = choose_forward(Path(args.model), args.embedded, shape, device, this_cpu())
    model = load_model(Path(args.model), shape, plan.kind)
    shard_model(model, group)
    size = args.kv_cache_config.tokens_per_block
    wanted = new_pool(shape, build.num_blocks, size, device, group.size)
    pool = KvPool(_allocate(args, wanted, group, transfers))
    forward = plan.make_forward(model, pool, longest_sequence(args, shape, build.num_blocks))
    return ModelRunner(forward, pool, plan.ops)


def _allocate(args: LlmArgs, wanted: PoolShape, group: RankGroup, transfers: TransferService) -> torch.Tensor:
    """The pool, in memory that the transport (if any) can serve."""
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return new_memory(*wanted)
    transport = transport_of(config.backend, wanted.device)
    pool = transport.allocate(*wanted)
    transfers.start(transport, pool, group.rank, group.size)
    return pool
