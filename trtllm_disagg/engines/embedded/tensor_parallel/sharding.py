"""A transformers model cut down to one rank's part, layer by layer, by the names of its modules.

Every matrix is cut along its output, never along the sum: what a rank computes is, bit for bit, its columns of
what one process would compute. So the inputs of `o_proj` and `down_proj`, which are spread over the ranks, are
gathered before the product, and its columns afterwards (decision 8). So are those of every expert (pack.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trtllm_disagg.engines.embedded.model.pack import linear_over
from trtllm_disagg.engines.embedded.tensor_parallel.group import RankGroup
from trtllm_disagg.engines.embedded.tensor_parallel.launch import KEY
from trtllm_disagg.errors import ConfigError

#: Whole input, some of the outputs: heads, or feed-forward dimensions.
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
#: The input is spread over the ranks; every rank needs the whole output.
_GATHERED = ("o_proj", "down_proj")
#: Small, and the same on every rank.
_WHOLE = ("gate", "router", "shared_expert_gate")
_HEAD = "lm_head"


class GatheredLinear(nn.Module):
    """Input and output are spread over the ranks; `linear` has this rank's rows of the weight."""

    def __init__(self, linear: nn.Linear, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs / ranks) -> (..., outputs)"""
        return self._group.gather_columns(self.linear(self._group.gather_columns(x)))


class CollectedHead(nn.Module):
    """The head over this rank's part of the vocabulary; rank 0 gets all logits, the others keep their own."""

    def __init__(self, linear: nn.Linear, vocab_size: int, group: RankGroup) -> None:
        super().__init__()
        self.linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.collect_columns(self.linear(x), self._vocab_size)


def shard_model(model: nn.Module, group: RankGroup) -> None:
    """Cut `model` in place; what belongs to other ranks is let go at once. Raises ConfigError for a layer that it
    does not know.
    """
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
    """Some of the outputs. A copy: a view would keep the whole alive."""
    rows = group.part(linear.out_features)
    bias = None if linear.bias is None else linear.bias[rows].clone()
    return linear_over(linear.weight[rows].clone(), bias)


def _shard_experts(experts: Any, group: RankGroup) -> None:
    """All experts of a layer as two tensors, (experts, 2 * inner, hidden) and (experts, hidden, inner)."""
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    count, hidden, inner = down.shape
    if gate_up.shape != (count, 2 * inner, hidden):
        raise ConfigError.bad_value(KEY, group.size, "1 for this model: its experts have another shape")
    part, rows = group.part(inner), group.part(hidden)
    mine = gate_up.view(count, 2, inner, hidden)[:, :, part].reshape(count, -1, hidden).clone()
    experts.gate_up_proj = nn.Parameter(mine, requires_grad=False)
    experts.down_proj = nn.Parameter(down[:, rows].clone(), requires_grad=False)
    experts.gather_columns = group.gather_columns
