"""The input and output of a step, as plain numbers, independent of what computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from trtllm_disagg.engines.embedded.ipc.messages import LogprobEntry

#: Prefill queries are cut into tiles of so many positions (attention.py).
TILE = 32


class ForwardRow(msgspec.Struct, array_like=True):
    """A run of tokens of one sequence, in a step. Rows that decode come first."""

    #: The tokens to compute, at the positions from `num_computed` on; the KV of those before is in `blocks`.
    tokens: list[int]
    num_computed: int
    #: Ids of its blocks in the pool, in the order of the positions; at least as many as this step reads and writes.
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
    """The result of a row with `num_logits`."""

    #: None: the row ends within the prompt.
    token: int | None
    logprobs: LogprobEntry | None
    #: Logprobs of each requested prompt position (`SamplingSpec.prompt_logprobs`).
    of_prompt: Sequence[LogprobEntry] = ()
