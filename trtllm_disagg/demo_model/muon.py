"""The Muon optimizer in float32, which every processor is good at.

torch's own always works in bfloat16, and where the processor has no bfloat16 products, torch multiplies such numbers
one by one. This one also takes matrices of one shape together, and fewer and smaller products for the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Coefficients of x, x^3 and x^5, step after step: each polynomial is the best one for what the steps before it leave
#: of the singular values (Amsel et al., "The Polar Express", 2025), here with their margin of 1 %.
_POLYNOMIALS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
)
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """For matrices. An update has all singular values near one, whatever the gradient's were."""

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._by_shape: dict[torch.Size, list[Tensor]] = {}
        for matrix in self.param_groups[0]["params"]:
            self._by_shape.setdefault(matrix.shape, []).append(matrix)
        self._averages = {shape: torch.zeros(len(same), *shape) for shape, same in self._by_shape.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Every matrix must have a gradient; there is no closure."""
        group = self.param_groups[0]
        for shape, matrices in self._by_shape.items():
            gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
            average = self._averages[shape].lerp_(gradients, 1 - _MOMENTUM)
            updates = orthogonal(gradients.lerp_(average, _MOMENTUM))
            size = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, rows, columns): the same singular vectors, singular values near one.

    The polynomials are applied to the small square X X^T, and their product once to X.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        wide: Tensor = orthogonal(matrices.mT).mT
        return wide
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    square = x @ x.mT
    product = _factor(square, *_POLYNOMIALS[0])
    last = product
    for coefficients in _POLYNOMIALS[1:]:
        square = last @ square @ last
        last = _factor(square, *coefficients)
        product = last @ product
    made: Tensor = product @ x
    return made


def _factor(square: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b S + c S S."""
    factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor
