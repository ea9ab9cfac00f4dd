"""Runs the rows of a step through the model: one fused forward for decode rows and prefill chunks alike."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import torch

from trtllm_disagg.embedded.attention import StepLayout
from trtllm_disagg.embedded.kv_pool import KvPool
from trtllm_disagg.embedded.scheduler import Row

if TYPE_CHECKING:
    from trtllm_disagg.embedded.decode_rows import DecodeRows

#: A step's leading rows that one kernel serves; None where there are none, or no kernel.
TakeDecodeRows = Callable[[Seq[Row], KvPool], "DecodeRows | None"]


def no_decode_rows(rows: Seq[Row], pool: KvPool) -> None:
    """torch's attention serves every row."""


class Forward(Protocol):
    """A model. It knows nothing of requests, phases or disaggregation."""

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        """Logits of the rows in `layout.last`: (sampling rows, vocabulary). Valid until the next call."""
        ...

    def close(self) -> None: ...


class ModelRunner:
    def __init__(
        self, forward: Forward, pool: KvPool, take_decode_rows: TakeDecodeRows = no_decode_rows
    ) -> None:
        self._forward = forward
        self._pool = pool
        self._take_decode_rows = take_decode_rows

    @property
    def tokens_per_block(self) -> int:
        return self._pool.tokens_per_block

    @torch.inference_mode()
    def run(self, rows: Seq[Row]) -> torch.Tensor:
        """Logits (sampling rows, vocabulary): one row for each of `rows` that samples, in their order."""
        tokens = [token for row in rows for token in row.tokens]
        return self._forward(tokens, StepLayout(rows, self._pool, self._take_decode_rows(rows, self._pool)))

    def close(self) -> None:
        self._forward.close()
