"""The input and output of a step as plain numbers, for any model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trtllm_disagg.engines.embedded.ipc.messages import LogprobEntry

if TYPE_CHECKING:
    import torch

#: Positions in a tile of prefill queries (attention.py).
TILE = 32


class ImageRows(NamedTuple):
    """Vectors that replace the embeddings of a row's tokens from `start` on."""

    start: int
    #: (tokens, hidden) float32.
    vectors: torch.Tensor


class ForwardRow(msgspec.Struct, array_like=True):
    """A run of tokens of one sequence in a step. Decode rows come first."""

    #: Tokens to compute, from position `num_computed` on; `blocks` has the KV before.
    tokens: list[int]
    num_computed: int
    #: Ids of its blocks in the pool, by position; at least those that this step uses.
    blocks: list[int]
    #: True for tokens of the prompt, which attend in tiles.
    in_prefill: bool
    #: Number of last tokens that need logits.
    num_logits: int
    #: `ImageRows` that stand in its tokens; only in an engine of one rank.
    images: tuple[Any, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Sampled:
    """The result of a row with `num_logits`."""

    #: None if the row ends within the prompt.
    token: int | None
    logprobs: LogprobEntry | None
    #: Logprobs of each requested prompt position (`SamplingSpec.prompt_logprobs`).
    of_prompt: Sequence[LogprobEntry] = ()
