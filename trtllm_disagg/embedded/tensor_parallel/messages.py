"""What rank 0 tells the other ranks, as msgpack over a Unix socket."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from trtllm_disagg.embedded.kv_cache.memory import KvCommand
from trtllm_disagg.embedded.model.attention import ForwardRow


class Build(msgspec.Struct, tag="build"):
    """Load your part of the model, and make room for this many blocks."""

    args: dict[str, Any]
    num_blocks: int


class Step(msgspec.Struct, tag="step"):
    rows: list[ForwardRow]


class Stop(msgspec.Struct, tag="stop"):
    pass


RankCommand = Build | Step | KvCommand | Stop


class Built(msgspec.Struct, tag="built"):
    pass


class Broken(msgspec.Struct, tag="broken"):
    """This rank cannot go on."""

    kind: str
    message: str


Reply = Built | Broken


def step_of(rows: Seq[ForwardRow], tokens_per_block: int) -> Step:
    """With as many blocks of each row as the step reads and writes."""
    return Step(
        [
            ForwardRow(
                row.tokens,
                row.num_computed,
                row.blocks[: -(-(row.num_computed + row.num_tokens) // tokens_per_block)],
                row.in_prefill,
                row.samples,
            )
            for row in rows
        ]
    )
