"""The ranks as the forward sees them: tensors are gathered and summed, in an order that never changes.

mpi4py with plain buffers, nothing is pickled. Nothing is left to MPI's own reductions either: their order of
summation depends on the size of the message, and so on who else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class RankGroup:
    """Every method is collective: all ranks call it, with tensors of the same shape."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def part(self, count: int) -> slice:
        """This rank's part of `count` things; the parts differ by at most one."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """(..., n) -> (..., size * n): every rank's columns, by rank, on every rank."""
        width = x.shape[-1]
        every = self._gather(x.reshape(-1, width))
        # Not -1: a step that samples nothing has no rows.
        return every.transpose(0, 1).reshape(*x.shape[:-1], self.size * width)

    def collect_columns(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """(rows, this rank's part of `count`) -> (rows, count) on rank 0; the others get `x` back."""
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        if self.rank:
            self._communicator.Gatherv(_bytes(x), None, root=0)
            return x
        ends = [(rank + 1) * count // self.size for rank in range(self.size)]
        widths = np.diff([0, *ends])
        assert width == widths[0]
        flat = torch.empty(rows * count, dtype=x.dtype)
        sizes = widths * rows * x.element_size()
        starts = np.cumsum(sizes) - sizes
        self._communicator.Gatherv(_bytes(x), [_bytes(flat), sizes, starts, _byte_type()], root=0)
        whole = torch.split(flat, [int(each) * rows for each in widths])
        parts = [part.view(rows, int(each)) for part, each in zip(whole, widths, strict=True)]
        return torch.cat(parts, dim=1).view(*x.shape[:-1], count)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """(...) -> (size, ...)"""
        every = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self._communicator.Allgather(_bytes(x), _bytes(every))
        return every


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _byte_type() -> Any:
    from mpi4py import MPI

    return MPI.BYTE
