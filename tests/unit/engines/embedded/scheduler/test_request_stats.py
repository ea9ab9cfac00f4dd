"""What the statistics of steps say of paused answers and of blocks that are reused."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core

PROMPT = list(range(5, 45))


@pytest.mark.parametrize("swap_tokens", [0, 1000])
def test_an_answer_that_is_paused_is_generated_and_looked_up_once(
    checkpoints: Checkpoints, swap_tokens: int
) -> None:
    """It is computed again where the swap space has no room for it, and finds its own blocks."""
    args = {
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "kv_cache_config": {"max_tokens": 128, "tokens_per_block": 16},
        "max_seq_len": 128,
        "embedded": {"swap_tokens": swap_tokens},
    }
    with closing(Core(checkpoints(), **args)) as core:
        core.run(*(core.add([first, *PROMPT], 40) for first in (2, 3, 4)))
        assert any(stat["inflightBatchingStats"]["numPausedRequests"] for stat in core.stats)
        stat = core.stats[-1]
    assert stat["totals"]["decodeTokens"] == 3 * 39
    assert (stat["kvCacheStats"]["reusedBlocks"], stat["kvCacheStats"]["missedBlocks"]) == (0, 9)


def test_a_block_of_which_a_part_is_reused_is_a_miss_and_no_hit(checkpoints: Checkpoints) -> None:
    with closing(Core(checkpoints(), kv_cache_config={"max_tokens": 4096, "tokens_per_block": 16})) as core:
        for number in range(5):
            core.generate([1, *range(10 * number + 2, 10 * number + 18)], 2)
    blocks = core.stats[-1]["kvCacheStats"]
    assert (blocks["reusedBlocks"], blocks["missedBlocks"]) == (0, 10)
