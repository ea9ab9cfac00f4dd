"""Rank 0 of several ranks: the engine core asks for a forward, and every rank runs it with its part of the model."""

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
from torch import nn

from trtllm_disagg import errors
from trtllm_disagg.engines.embedded.kv_cache.memory import KvCommand, KvMemory
from trtllm_disagg.engines.embedded.model.forward import ModelRunner
from trtllm_disagg.engines.embedded.model.pack import linear_over
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
from trtllm_disagg.engines.embedded.tensor_parallel.launch import KEY, death_of
from trtllm_disagg.errors import ConfigError

_replies = msgspec.msgpack.Decoder(Reply)
_broken = msgspec.msgpack.Decoder(Broken)


class Runner(Protocol):
    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        """Logits (sampling rows, vocabulary). Valid until the next call."""

    def close(self) -> None: ...


class SingleRank:
    """The team of a single-process engine."""

    size = 1
    others: tuple[OtherRank, ...] = ()

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks, this one first."""
        return [os.getpid()]

    def start(self, args: LlmArgs, num_blocks: int) -> None:
        """Does nothing: there is no other rank."""

    def shard(self, model: Any) -> None:
        """Does nothing: this rank has the whole model."""

    def memory(self, memory: KvMemory) -> KvMemory:
        return memory

    def broadcasting(self, runner: ModelRunner) -> Runner:
        return runner

    def close(self) -> None:
        """Does nothing: there is no rank to stop."""


class Team:
    """Rank 0 with the other ranks. Losing a rank ends the engine: calls `on_lost` once, with the reason."""

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
        """Let the others load their part while this rank loads its own."""
        self.send(Build(core_args(args), num_blocks))

    def shard(self, model: Any) -> None:
        shard_model(model, self._group)

    def memory(self, memory: KvMemory) -> KvMemory:
        """`memory`, with all commands also sent to every other rank."""
        return BroadcastingKvMemory(memory, self)

    def broadcasting(self, runner: ModelRunner) -> Runner:
        """Wait until the others are ready. Raises their error, e.g. ConfigError."""
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
            # Both processes keep the sockets: a closed one means a dead rank.
            self.send(Stop())

    def send(self, command: msgspec.Struct) -> None:
        """Raises RankLostError."""
        for other in self.others:
            try:
                other.commands.send(command)
            except OSError:
                raise RankLostError(death_of(other.rank, other.pid)) from None
            other.sent += 1

    def settle(self) -> None:
        """Later reads wait for all commands sent so far, which may still use the blocks that they fill."""
        for other in self.others:
            other.settled = other.sent

    def _gone(self, other: OtherRank, last: Broken | None) -> None:
        self.lost(death_of(other.rank, other.pid) if last is None else str(_error_of(other, last)))

    def lost(self, reason: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._on_lost(reason)


class BroadcastingRunner:
    """Sends every step to the others, then runs it. If it fails here, the others hang in it."""

    def __init__(self, runner: ModelRunner, team: Team) -> None:
        self._runner = runner
        self._team = team

    def run(self, rows: Seq[ForwardRow]) -> torch.Tensor:
        try:
            self._team.send(step_of(rows, self._runner.pool.tokens_per_block))
            logits = self._runner.run(rows)
            self._team.settle()
            return logits
        except Exception as error:
            self._team.lost(f"a step failed on rank 0: {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        self._runner.close()


class BroadcastingKvMemory:
    """Sends commands like steps, in the same order."""

    def __init__(self, memory: KvMemory, team: Team) -> None:
        self._memory = memory
        self._team = team

    def apply(self, command: KvCommand) -> None:
        self._team.send(command)
        self._team.settle()
        self._memory.apply(command)


def open_team(args: LlmArgs, on_lost: Callable[[str], None]) -> SingleRank | Team:
    """The team of `tensor_parallel_size` ranks that `launch.py` started."""
    if args.tensor_parallel_size == 1:
        return SingleRank()
    group, others = join_as_leader(args.tensor_parallel_size, on_lost)
    return Team(group, others, on_lost)


def _error_of(other: OtherRank, reply: Broken) -> errors.DisaggError:
    return errors.named(reply.error_class, reply.message) or RankLostError(
        f"rank {other.rank} of the engine: {reply.error_class}: {reply.message}"
    )


# Cuts a model to one rank's part, layer by layer, by module names. It cuts every matrix along its output, never along
# the sum, so a rank computes its columns of the single-process result, bit for bit. So `o_proj`, `down_proj` and the
# experts (pack.py) gather their distributed input before the product, and the columns afterwards (decision 8).

#: Whole input, a part of the outputs: heads, or feed-forward dimensions.
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
#: Distributed input; every rank needs the whole output.
_GATHERED = ("o_proj", "down_proj")
#: Small, so the same on every rank.
_WHOLE = ("gate", "router", "shared_expert_gate")
_HEAD = "lm_head"


class GatheredLinear(nn.Module):
    """Gathers its distributed input and output; `linear` has this rank's rows of the weight."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs / ranks) -> (..., outputs)"""
        return self._group.gather_columns(self.linear(self._group.gather_columns(x)))


class CollectedHead(nn.Module):
    """The head over this rank's part of the vocabulary; rank 0 gets all logits."""

    def __init__(self, linear: nn.Linear, vocab_size: int, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.collect_columns(self.linear(x), self._vocab_size)


def shard_model(model: nn.Module, group: RankGroup) -> None:
    """Cut `model` in place, releasing the other ranks' parts. Raises ConfigError for an unknown layer."""
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, child_name, _shard_linear(f"{name}.{child_name}", child, group))
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            _shard_experts(module, group)


def _shard_linear(path: str, linear: nn.Linear, group: RankGroup) -> nn.Module:
    name = path.rpartition(".")[2]
    if name in _COLUMNS:
        return _part(linear, group)
    if name in _GATHERED:
        return GatheredLinear(_part(linear, group), group)
    if name == _HEAD:
        return CollectedHead(_part(linear, group), linear.out_features, group)
    if name in _WHOLE:
        return linear
    raise ConfigError.bad_value(KEY, group.size, f"1 for this model: no rule says how to divide {path}")


def _part(linear: nn.Linear, group: RankGroup) -> nn.Linear:
    """This rank's outputs, as a copy: a view would keep the whole weight in memory."""
    rows = group.part(linear.out_features)
    bias = None if linear.bias is None else linear.bias[rows].clone()
    return linear_over(linear.weight[rows].clone(), bias)


def _shard_experts(experts: Any, group: RankGroup) -> None:
    """Cuts a layer's experts: two tensors, (experts, 2 * inner, hidden) and (experts, hidden, inner)."""
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    count, hidden, inner = down.shape
    if gate_up.shape != (count, 2 * inner, hidden):
        raise ConfigError.bad_value(KEY, group.size, "1 for this model: its experts have another shape")
    part, rows = group.part(inner), group.part(hidden)
    mine = gate_up.view(count, 2, inner, hidden)[:, :, part].reshape(count, -1, hidden).clone()
    experts.gate_up_proj = nn.Parameter(mine, requires_grad=False)
    experts.down_proj = nn.Parameter(down[:, rows].clone(), requires_grad=False)
    experts.gather_columns = group.gather_columns
