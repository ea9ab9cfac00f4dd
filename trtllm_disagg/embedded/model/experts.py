"""Mixture-of-experts layers over prepacked weights, in place of transformers' router and experts.

In theirs an expert's product depends on how many tokens chose it, so in float32 the last bits of a token do too.
Here every expert is two products of ours (pack.py), and a token's experts are summed in the order of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trtllm_disagg.embedded.model.layer_ops import LayerOps
from trtllm_disagg.embedded.model.pack import Pack, linear_over


class PackedRouter(nn.Module):
    """(tokens, hidden) -> logits (tokens, experts), weights and indices (tokens, top k), best first."""

    def __init__(self, router: Any, pack: Pack) -> None:
        super().__init__()
        self._logits = pack(linear_over(router.weight))
        self._top_k: int = router.top_k
        #: Qwen3 says whether the weights of the chosen sum to one; Mixtral's always do.
        self._normalise: bool = getattr(router, "norm_topk_prob", True)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._logits(hidden)
        weights, indices = logits.float().softmax(-1).topk(self._top_k, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, indices


class PackedExperts(nn.Module):
    def __init__(self, experts: Any, pack: Pack, ops: LayerOps) -> None:
        """Takes the weights of `experts`: it cannot be used afterwards."""
        super().__init__()
        self._ops = ops
        self._gate_up = [pack(linear_over(weight)) for weight in experts.gate_up_proj]
        del experts.gate_up_proj
        self._down = [pack(linear_over(weight)) for weight in experts.down_proj]
        del experts.down_proj
        #: With several ranks, each has some columns of both products.
        self._gather: Callable[[torch.Tensor], torch.Tensor] = getattr(experts, "gather_columns", _as_it_is)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden); index and weights (tokens, top k)."""
        chosen = top_k_index.reshape(-1)
        # (token, choice) pairs, those of one expert next to each other.
        order = chosen.argsort(stable=True)
        rows = hidden[order // top_k_index.shape[1]]
        made = torch.empty_like(rows)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=len(self._down)).tolist()):
            if count:
                part = slice(start, start + count)
                made[part] = self._run(expert, rows[part])
                start += count
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return self._ops.weighted_sum(made, place.view(top_k_index.shape), top_k_weights.float())

    def _run(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        activated = self._ops.silu_mul(self._gate_up[expert](rows))
        made: torch.Tensor = self._gather(self._down[expert](self._gather(activated)))
        return made


def pack_experts(module: nn.Module, pack: Pack, ops: LayerOps) -> None:
    """Replace router and experts of every mixture below `module`, under their own names."""
    for child in module.modules():
        if hasattr(child, "experts") and hasattr(child, "gate"):
            child.gate, child.experts = (
                PackedRouter(child.gate, pack),
                PackedExperts(child.experts, pack, ops),
            )


def _as_it_is(columns: torch.Tensor) -> torch.Tensor:
    return columns
