"""What rank 0 tells the other ranks, as msgpack over a Unix socket."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from trtllm_disagg.embedded.model.row import ForwardRow


class StepRow(msgspec.Struct, array_like=True):
    """A `ForwardRow` on its way to another rank."""

    tokens: list[int]
    num_computed: int
    #: As many as this step reads and writes.
    blocks: list[int]
    in_prefill: bool
    samples: bool

    @classmethod
    def of(cls, row: ForwardRow, tokens_per_block: int) -> StepRow:
        num_blocks = -(-(row.num_computed + row.num_tokens) // tokens_per_block)
        return cls(
            list(row.tokens), row.num_computed, list(row.blocks[:num_blocks]), row.in_prefill, row.samples
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Build(msgspec.Struct, tag="build"):
    """Load your part of the model, and make room for this many blocks."""

    args: dict[str, Any]
    num_blocks: int


class Step(msgspec.Struct, tag="step"):
    rows: list[StepRow]


class CopyStart(msgspec.Struct, tag="copy_start"):
    """This and the next three: `KvMemory`, on this rank's part of the pool."""

    source: int
    target: int
    num_tokens: int


class Save(msgspec.Struct, tag="save"):
    slot: int
    blocks: list[int]


class Restore(msgspec.Struct, tag="restore"):
    slot: int
    first: int
    blocks: list[int]


class Drop(msgspec.Struct, tag="drop"):
    slot: int


class Stop(msgspec.Struct, tag="stop"):
    pass


RankCommand = Build | Step | CopyStart | Save | Restore | Drop | Stop


class Built(msgspec.Struct, tag="built"):
    pass


class Broken(msgspec.Struct, tag="broken"):
    """This rank cannot go on."""

    kind: str
    message: str


Reply = Built | Broken


def step_of(rows: Seq[ForwardRow], tokens_per_block: int) -> Step:
    return Step([StepRow.of(row, tokens_per_block) for row in rows])
