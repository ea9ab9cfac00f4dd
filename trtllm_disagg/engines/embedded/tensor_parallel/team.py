"""Rank 0's side of an engine of several ranks: the engine core asks for a forward, and all ranks run it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, Protocol

import msgspec
import torch

from trtllm_disagg import errors
from trtllm_disagg.engines.embedded.kv_cache.memory import KvCommand, KvMemory
from trtllm_disagg.engines.embedded.model.forward import ModelRunner
from trtllm_disagg.engines.embedded.model.rows import ForwardRow
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs, core_args
from trtllm_disagg.engines.embedded.tensor_parallel.group import (
    Broken,
    Build,
    OtherRank,
    RankGroup,
    RankLostError,
    Reply,
    Stop,
    join_as_leader,
    step_of,
    watch,
)
from trtllm_disagg.engines.embedded.tensor_parallel.launch import death_of
from trtllm_disagg.engines.embedded.tensor_parallel.sharding import shard_model

_replies = msgspec.msgpack.Decoder(Reply)
_broken = msgspec.msgpack.Decoder(Broken)


class Runner(Protocol):
    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        """Logits (sampling rows, vocabulary). Valid until the next call."""

    def close(self) -> None: ...


class SingleRank:
    """The team of an engine that is a single process."""

    size = 1
    others: tuple[OtherRank, ...] = ()

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
    """Rank 0 with the other ranks. A rank that is lost takes the engine with it: `on_lost` is told why, once."""

    def __init__(self, group: RankGroup, others: list[OtherRank], on_lost: Callable[[str], None]) -> None:
        self.size = group.size
        self.pids = [os.getpid(), *(other.pid for other in others)]
        self._group = group
        self.others = tuple(others)
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._is_over = False
        for other in others:
            watch(other, _broken, partial(self._gone, other))

    def start(self, args: LlmArgs, num_blocks: int) -> None:
        """The others begin to load their part, while this rank loads its own."""
        self.tell(Build(core_args(args), num_blocks))

    def shard(self, model: Any) -> None:
        shard_model(model, self._group)

    def memory(self, memory: KvMemory) -> KvMemory:
        """What happens to blocks between steps happens to every rank's part of them."""
        return BroadcastingKvMemory(memory, self)

    def broadcasting(self, runner: ModelRunner) -> Runner:
        """Waits until the others are ready too. Raises what kept them, e.g. ConfigError."""
        for other in self.others:
            try:
                reply = other.commands.receive(_replies)
            except (OSError, EOFError):
                raise RankLostError(death_of(other.rank, other.pid)) from None
            if isinstance(reply, Broken):
                raise _error_of(other, reply)
        return BroadcastingRunner(runner, self)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
        with contextlib.suppress(RankLostError):
            # The sockets stay, to the end of both processes: a rank that sees one close takes the other for dead.
            self.tell(Stop())

    def tell(self, command: msgspec.Struct) -> None:
        """Raises RankLostError."""
        for other in self.others:
            try:
                other.commands.send(command)
            except OSError:
                raise RankLostError(death_of(other.rank, other.pid)) from None
            other.told += 1

    def settle(self) -> None:
        """Reads that begin from now on come after all that was told: they fill blocks that it may still use."""
        for other in self.others:
            other.settled = other.told

    def _gone(self, other: OtherRank, last: Broken | None) -> None:
        self.lost(death_of(other.rank, other.pid) if last is None else str(_error_of(other, last)))

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
            self._team.tell(step_of(rows, self._runner.tokens_per_block))
            logits = self._runner.run(rows)
            self._team.settle()
            return logits
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
        self._team.tell(command)
        self._team.settle()
        self._memory.apply(command)


def open_team(args: LlmArgs, on_lost: Callable[[str], None]) -> SingleRank | Team:
    """The team of `tensor_parallel_size` ranks, which have been started already (`launch.py`)."""
    if args.tensor_parallel_size == 1:
        return SingleRank()
    group, others = join_as_leader(args.tensor_parallel_size, on_lost)
    return Team(group, others, on_lost)


def _error_of(other: OtherRank, reply: Broken) -> errors.DisaggError:
    return errors.named(reply.kind, reply.message) or RankLostError(
        f"rank {other.rank} of the engine: {reply.kind}: {reply.message}"
    )
