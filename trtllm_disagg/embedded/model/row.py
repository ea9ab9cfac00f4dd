"""What a forward is told of each row of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol


class ForwardRow(Protocol):
    """A run of tokens of one sequence. Rows that decode come first in a step."""

    @property
    def tokens(self) -> Seq[int]:
        """The tokens to compute, at the positions from `num_computed` on."""
        ...

    @property
    def num_tokens(self) -> int:
        """As many as `tokens`."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens before these: their KV is in `blocks`."""
        ...

    @property
    def blocks(self) -> Seq[int]:
        """Blocks of the pool, in the order of the positions; at least as many as this step reads and writes."""
        ...

    @property
    def in_prefill(self) -> bool:
        """Whether these are tokens of the prompt: attention then runs in tiles."""
        ...

    @property
    def samples(self) -> bool:
        """Whether the logits of the last token are wanted."""
        ...
