"""Random requests through two engine processes over NIXL, with too few blocks, preempted, cancelled, abandoned."""

from __future__ import annotations

from tests.conftest import Checkpoints
from tests.support.storm import blow


async def test_storm_of_requests_loses_no_block_and_gives_right_answers(checkpoints: Checkpoints) -> None:
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
