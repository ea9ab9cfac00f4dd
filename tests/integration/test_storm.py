"""Random requests through two engine processes over NIXL, with too few blocks, preempted, cancelled, abandoned."""

from __future__ import annotations

from tests.conftest import Checkpoints
from tests.support.storm import blow


async def test_no_block_is_lost_and_every_answer_is_right(checkpoints: Checkpoints) -> None:
    seen = await blow(checkpoints(), seeds=[1], num_requests=36)

    happened = (
        "paused",
        "reused",
        "whole answered",
        "pull answered",
        "pull cancelled",
        "push answered",
        "push cancelled",
    )
    assert all(seen[what] for what in happened), seen
