"""Rank 0's side: the engine core asks for a forward, and all ranks run it. And the life of every other rank: load a
part, then sleep, and run a step whenever rank 0 says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from trtllm_disagg import errors
from trtllm_disagg.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.embedded.kv_cache.memory import (
    CopyStart,
    Drop,
    KvCommand,
    KvMemory,
    Restore,
    Save,
)
from trtllm_disagg.embedded.kv_cache.pool import KvPool, LocalKvMemory
from trtllm_disagg.embedded.model.forward import ModelRunner, choose_forward
from trtllm_disagg.embedded.model.model_loader import load_model
from trtllm_disagg.embedded.model.rows import ForwardRow
from trtllm_disagg.embedded.model.sizing import PoolShape, choose_device, new_pool
from trtllm_disagg.embedded.params.llm_args import LlmArgs, core_args
from trtllm_disagg.embedded.params.model_shape import max_seq_len, read_shape
from trtllm_disagg.embedded.params.supported_args import scope_of
from trtllm_disagg.embedded.tensor_parallel.group import (
    Broken,
    Build,
    Built,
    Peer,
    RankCommand,
    RankGroup,
    RankLostError,
    Reply,
    Step,
    Stop,
    join_as_follower,
    join_as_leader,
    leave,
    step_of,
    use_cpus,
    watch,
)
from trtllm_disagg.embedded.tensor_parallel.launch import IN_JOB, death_of
from trtllm_disagg.embedded.tensor_parallel.sharding import shard_model
from trtllm_disagg.embedded.tensor_parallel.transfers import TransferService
from trtllm_disagg.kv_transfer.host import new_memory
from trtllm_disagg.kv_transfer.transports import create_transport, needs_cma

_commands = msgspec.msgpack.Decoder(RankCommand)


def serve_as_follower() -> int:
    """A rank of its own process, until rank 0 ends it, or ends."""
    logging.basicConfig(level="INFO", format="%(levelname)s engine: %(message)s", stream=sys.stderr)
    group, leader = join_as_follower()
    # Also out of an MPI call that will never return. Nothing here needs to be closed.
    watch(leader, _commands, lambda _last: os._exit(0))
    if IN_JOB in sys.argv:
        threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    status = follow(group, leader)
    if status == 0 and IN_JOB in sys.argv:
        leave()
    return status


def follow(group: RankGroup, leader: Peer) -> int:
    """Serve as a rank of one engine, from Build to Stop. Returns the exit status."""
    transfers = TransferService(leader.transfers)
    try:
        build = leader.commands.receive(_commands)
        assert isinstance(build, Build)
        shard = build_shard(build, group, transfers)
    except EOFError:
        return 1
    except Exception as error:
        transfers.fail(error)
        log.debug("rank %d cannot start", group.rank, exc_info=True)
        leader.commands.send(Broken(type(error).__name__, str(error)))
        _wait_for_end(leader)
        return 1
    leader.commands.send(Built())
    while True:
        try:
            command = leader.commands.receive(_commands)
        except EOFError:
            return 1
        if isinstance(command, Stop):
            return 0
        try:
            shard.execute(command)
        except Exception as error:
            log.exception("a step failed on rank %d", group.rank)
            leader.lifeline.send(Broken(type(error).__name__, str(error)))
            return 1


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _wait_for_end(leader: Peer) -> None:
    """Rank 0 ends when it has read what is wrong; to die first would look like another reason."""
    with contextlib.suppress(EOFError, OSError):
        leader.commands.receive(_commands)


class ShardOfEngine:
    """Does what rank 0 does, in the same order."""

    def __init__(self, runner: ModelRunner, memory: LocalKvMemory) -> None:
        self._runner = runner
        self._memory = memory

    def execute(self, command: RankCommand) -> None:
        match command:
            case Step():
                self._runner.run(command.rows)
            case CopyStart() | Save() | Restore() | Drop():
                self._memory.apply(command)


def build_shard(build: Build, group: RankGroup, transfers: TransferService) -> ShardOfEngine:
    """As the engine core builds its own. Raises ConfigError like it."""
    args = LlmArgs.model_validate(build.args)
    use_cpus(args, group.rank)
    device = choose_device(args.embedded.device, group.size)
    shape = read_shape(Path(args.model), args.dtype)
    plan = choose_forward(Path(args.model), args.embedded, shape, device, this_cpu())
    model = load_model(Path(args.model), shape, plan.kind)
    shard_model(model, group)
    size = args.kv_cache_config.tokens_per_block
    wanted = new_pool(shape, build.num_blocks, size, device, group.size)
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
    transport = create_transport(config.backend, scope, needs_cma=needs_cma(scope, wanted.device.type))
    pool = transport.allocate(wanted.shape, wanted.dtype, wanted.device)
    transfers.start(transport, pool, group.rank, group.size)
    return pool


log = logging.getLogger(__name__)

_replies = msgspec.msgpack.Decoder(Reply)
_last_words = msgspec.msgpack.Decoder(Broken)


class Runner(Protocol):
    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        """Logits (sampling rows, vocabulary). Valid until the next call."""

    def close(self) -> None: ...


class SingleRank:
    """The team of an engine that is a single process."""

    size = 1
    peers: tuple[Peer, ...] = ()

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, this one first."""
        return [os.getpid()]

    def start(self, args: LlmArgs, num_blocks: int) -> None:
        """There is no other rank to start."""

    def shard(self, model: Any) -> None:
        """All of the model is here."""

    def memory(self, memory: KvMemory) -> KvMemory:
        return memory

    def broadcasting(self, runner: ModelRunner) -> Runner:
        return runner

    def close(self) -> None:
        """There is no other rank to stop."""


class Team:
    """Rank 0 with its peers. A peer that is lost takes the engine with it: `on_lost` is told why, once."""

    def __init__(self, group: RankGroup, peers: list[Peer], on_lost: Callable[[str], None]) -> None:
        self.size = group.size
        self.pids = [os.getpid(), *(peer.pid for peer in peers)]
        self._group = group
        self.peers = tuple(peers)
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._is_over = False
        for peer in peers:
            watch(peer, _last_words, partial(self._gone, peer))

    def start(self, args: LlmArgs, num_blocks: int) -> None:
        """The others begin to load their part, while this rank loads its own."""
        self._tell(Build(core_args(args), num_blocks))

    def shard(self, model: Any) -> None:
        shard_model(model, self._group)

    def memory(self, memory: KvMemory) -> KvMemory:
        """What happens to blocks between steps happens to every rank's part of them."""
        return BroadcastingKvMemory(memory, self)

    def broadcasting(self, runner: ModelRunner) -> Runner:
        """Waits until the others are ready too. Raises what kept them, e.g. ConfigError."""
        for peer in self.peers:
            try:
                reply = peer.commands.receive(_replies)
            except (OSError, EOFError):
                raise RankLostError(death_of(peer.rank, peer.pid)) from None
            if isinstance(reply, Broken):
                raise _error_of(peer, reply)
        return BroadcastingRunner(runner, self)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
        with contextlib.suppress(RankLostError):
            # The sockets stay, to the end of both processes: a rank that sees one close takes the other for dead.
            self._tell(Stop())

    def _tell(self, command: msgspec.Struct) -> None:
        for peer in self.peers:
            try:
                peer.commands.send(command)
            except OSError:
                raise RankLostError(death_of(peer.rank, peer.pid)) from None

    def _gone(self, peer: Peer, last: Broken | None) -> None:
        self.lost(death_of(peer.rank, peer.pid) if last is None else str(_error_of(peer, last)))

    def lost(self, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._on_lost(reason)


class BroadcastingRunner:
    """Every step is announced before it runs here. One that fails here leaves the others in the middle of it."""

    def __init__(self, runner: ModelRunner, team: Team) -> None:
        self._runner = runner
        self._team = team

    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        try:
            self._team._tell(step_of(rows, self._runner.tokens_per_block))
            return self._runner.run(rows)
        except Exception as error:
            self._team.lost(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        self._runner.close()


class BroadcastingKvMemory:
    """Announced like steps, and in the same order."""

    def __init__(self, memory: KvMemory, team: Team) -> None:
        self._memory = memory
        self._team = team

    def apply(self, command: KvCommand) -> None:
        self._team._tell(command)
        self._memory.apply(command)


def open_team(args: LlmArgs, on_lost: Callable[[str], None]) -> SingleRank | Team:
    """As many ranks as `tensor_parallel_size` says; they have been started already (`launch.py`)."""
    if args.tensor_parallel_size == 1:
        return SingleRank()
    group, peers = join_as_leader(args.tensor_parallel_size, on_lost)
    return Team(group, peers, on_lost)


def _error_of(peer: Peer, reply: Broken) -> errors.DisaggError:
    return errors.named(reply.kind, reply.message) or RankLostError(
        f"rank {peer.rank} of the engine: {reply.kind}: {reply.message}"
    )
