"""What a step is asked for and what comes out of it: plain numbers, whatever computes them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from trtllm_disagg.embedded.ipc.messages import LogprobEntry

#: Prefill queries are cut into tiles of so many positions (attention.py).
TILE = 32


class ForwardRow(msgspec.Struct, array_like=True):
    """A run of tokens of one sequence, in a step. Rows that decode come first."""

    #: The tokens to compute, at the positions from `num_computed` on; the KV of those before is in `blocks`.
    tokens: list[int]
    num_computed: int
    #: Of the pool, in the order of the positions; at least as many as this step reads and writes.
    blocks: list[int]
    #: Whether these are tokens of the prompt: attention then runs in tiles.
    in_prefill: bool
    #: Whether the logits of the last token are wanted.
    samples: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Sampled:
    """The token that a row yields."""

    token: int
    logprobs: LogprobEntry | None
