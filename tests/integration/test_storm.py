"""Random requests through two engine processes over NIXL, with too few blocks, preempted, cancelled, abandoned."""

from __future__ import annotations

from collections import Counter

from tests.conftest import Checkpoints
from tests.support.storm import blow

HAPPENED = (
    "paused",
    "reused",
    "whole answered",
    "pull answered",
    "pull cancelled",
    "push answered",
    "push cancelled",
)


async def test_storm_of_requests_loses_no_block_and_gives_right_answers(checkpoints: Checkpoints) -> None:
    """Which requests meet depends on the machine's time, so a storm in which something did not happen is followed by
    another one.
    """
    seen: Counter[str] = Counter()
    for seed in (1, 2, 3):
        seen += await blow(checkpoints(), seeds=[seed], num_requests=36)
        if all(seen[what] for what in HAPPENED):
            return
    raise AssertionError(f"did not happen: {[what for what in HAPPENED if not seen[what]]} in {seen}")
