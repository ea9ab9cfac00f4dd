"""What a step is asked for and what comes out of it: plain numbers, whatever computes them."""

from __future__ import annotations

from collections.abc import Sequence
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
    #: Logits are wanted of so many of the tokens, the last ones.
    num_logits: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Sampled:
    """What a row yields of which logits are wanted."""

    #: None: the row ends within the prompt.
    token: int | None
    logprobs: LogprobEntry | None
    #: Of the prompt, for each position that was asked for (`SamplingSpec.prompt_logprobs`).
    of_prompt: Sequence[LogprobEntry] = ()
