"""Replaces the products in a tree of modules, experts included, by equivalent ones: of torch, or of linear.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trtllm_disagg.engines.embedded.model.layer_ops import LayerOps

#: Fewer rows are padded with zeros.
ROWS_AT_A_TIME = 16
#: Number of bfloat16 weights converted to float32 at a time, so that they stay in a cache.
_WIDENED = 1 << 18
#: Makes a product, which has `in_features` and `out_features`.
Pack = Callable[[nn.Linear], nn.Module]


def packed(module: nn.Module, pack: Pack) -> nn.Module:
    """A plain nn.Linear, or a layer of several, with packed weights."""
    if type(module) is nn.Linear:
        return pack(module)
    pack_linears(module, pack)
    return module


def pack_linears(module: nn.Module, pack: Pack) -> None:
    """Replace every plain nn.Linear below `module`."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, pack(child))
        else:
            pack_linears(child, pack)


def convert_others(module: nn.Module, dtype: torch.dtype) -> None:
    """Copy all unpacked weights to `dtype`, which releases the mapped checkpoint file."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype, copy=True)


def linear_over(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """An nn.Linear over these tensors (outputs, inputs), (outputs,), without a copy."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class TiledLinear(nn.Module):
    """torch's float32 matrix product, from and to float32, made independent of the batch.

    torch chooses its kernel, and so a row's bits, by the number of rows. So this multiplies a fixed number at a time,
    padded with zeros. A trial proves that a row's place does not matter; if it does, rows are multiplied one by one.

    Weights may stay bfloat16, half as large: then a part at a time becomes float32 for the product.
    """

    def __init__(self, linear: nn.Linear, kept: torch.dtype = torch.float32) -> None:
        """`kept`: dtype that holds the weights."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Model code reads weight.dtype.
        self.weight = linear.weight.detach().to("meta", torch.float32)
        self.bias_values = None if linear.bias is None else linear.bias.detach().to(torch.float32, copy=True)
        self._kept = linear.weight.detach().to(kept, copy=True).contiguous()
        # All outputs, or a number that depends only on the weight's shape.
        self._outputs = self.out_features if kept == torch.float32 else max(1, _WIDENED // self.in_features)
        self._rows = ROWS_AT_A_TIME if self._place_does_not_matter() else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        made = self._product(rows, self._rows)
        if self.bias_values is not None:
            made += self.bias_values
        return made.view(*x.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor, at_a_time: int) -> torch.Tensor:
        count = len(rows)
        padding = -count % at_a_time
        padded = nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows.contiguous()
        made = torch.empty((len(padded), self.out_features))
        for first in range(0, self.out_features, self._outputs):
            weights = self._kept[first : first + self._outputs].float().t()
            for row in range(0, len(padded), at_a_time):
                part = made[row : row + at_a_time, first : first + self._outputs]
                part.copy_(padded[row : row + at_a_time] @ weights)
        return made[:count]

    @torch.inference_mode()
    def _place_does_not_matter(self) -> bool:
        """Tries the same row in every place."""
        row = torch.randn((1, self.in_features), generator=torch.Generator().manual_seed(0))
        made = self._product(row.repeat(ROWS_AT_A_TIME, 1), ROWS_AT_A_TIME)
        return torch.equal(made, made[:1].expand_as(made))


class PackedRouter(nn.Module):
    """(tokens, hidden) -> logits (tokens, experts), weights and indices (tokens, top k), best first."""

    def __init__(self, router: Any, pack: Pack) -> None:
        super().__init__()
        self._logits = pack(linear_over(router.weight))
        self._top_k: int = router.top_k
        #: Qwen3 configures whether the chosen weights sum to one; Mixtral's always do.
        self._normalise: bool = getattr(router, "norm_topk_prob", True)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._logits(hidden)
        weights, indices = logits.float().softmax(-1).topk(self._top_k, dim=-1)
        if self._normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, indices


class PackedExperts(nn.Module):
    """A mixture over prepacked weights. In transformers' experts a token's last float32 bits depend on the number of
    tokens with the same expert. Here every expert is two products, summed in the order of the token's choice.
    """

    def __init__(self, experts: Any, pack: Pack, ops: LayerOps) -> None:
        """Consumes `experts`."""
        super().__init__()
        self._ops = ops
        self._gate_up = [pack(linear_over(weight)) for weight in experts.gate_up_proj]
        del experts.gate_up_proj
        self._down = [pack(linear_over(weight)) for weight in experts.down_proj]
        del experts.down_proj
        #: With several ranks, each has a part of the columns of both products.
        self._gather: Callable[[torch.Tensor], torch.Tensor] = getattr(experts, "gather_columns", _as_it_is)

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, hidden) -> (tokens, hidden); index and weights (tokens, top k)."""
        chosen = top_k_index.reshape(-1)
        # (token, choice) pairs, grouped by expert.
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
    """Replace router and experts of every mixture below `module`, keeping their names."""
    for child in module.modules():
        if hasattr(child, "experts") and hasattr(child, "gate"):
            child.gate, child.experts = (
                PackedRouter(child.gate, pack),
                PackedExperts(child.experts, pack, ops),
            )


def _as_it_is(columns: torch.Tensor) -> torch.Tensor:
    return columns
