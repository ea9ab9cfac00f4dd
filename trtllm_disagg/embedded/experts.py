"""Mixture-of-experts layers over prepacked weights, in place of transformers' router and experts.

In theirs an expert's product depends on how many tokens chose it, so in float32 the last bits of a token do too.
Here every expert is two `PackedLinear`, and a token's experts are summed in the order of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trtllm_disagg.embedded import kernels
from trtllm_disagg.embedded.linear import PackedLinear
from trtllm_disagg.embedded.views import as_array


class PackedRouter(nn.Module):
    """(tokens, hidden) -> logits (tokens, experts), weights and indices (tokens, top k), best first."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._logits = PackedLinear(_linear(router.weight))
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
    def __init__(self, experts: Any) -> None:
        """Takes the weights of `experts`: it cannot be used afterwards."""
        super().__init__()
        self._gate_up = [PackedLinear(_linear(weight)) for weight in experts.gate_up_proj]
        del experts.gate_up_proj
        self._down = [PackedLinear(_linear(weight)) for weight in experts.down_proj]
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
        out = torch.empty_like(hidden)
        kernels.weighted_sum(
            as_array(made),
            place.view(top_k_index.shape).numpy(),
            top_k_weights.float().numpy(),
            as_array(out),
        )
        return out

    def _run(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up[expert](rows)
        activated = rows.new_empty((len(rows), gate_up.shape[1] // 2))
        kernels.silu_mul(as_array(gate_up), as_array(activated), 0, activated.shape[1])
        return self._gather(self._down[expert](self._gather(activated)))


def pack_experts(module: nn.Module) -> None:
    """Replace router and experts of every mixture below `module`, under their own names."""
    for child in module.modules():
        if hasattr(child, "experts") and hasattr(child, "gate"):
            child.gate, child.experts = PackedRouter(child.gate), PackedExperts(child.experts)


def _as_it_is(columns: torch.Tensor) -> torch.Tensor:
    return columns


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear
