"""What a step says of each request, and what it writes into the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core

PROMPT = list(range(5, 45))
SHARED = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}, "enable_iter_req_stats": True}


@pytest.fixture
def prefill(checkpoints: Checkpoints) -> Iterator[Core]:
    core = Core(checkpoints(), **SHARED)
    yield core
    core.close()


@pytest.fixture
def decode(checkpoints: Checkpoints) -> Iterator[Core]:
    core = Core(checkpoints(), max_batch_size=1, **SHARED)
    yield core
    core.close()


def of_requests(core: Core) -> list[dict[str, Any]]:
    return [entry for stat in core.stats for entry in stat["requestStats"]]


def test_decode_statistics_have_the_transfer_only_when_measured(prefill: Core, decode: Core) -> None:
    # Another prompt, all of which has to come, too.
    for arrived, prompt in ((None, PROMPT), (time.monotonic(), PROMPT[::-1])):
        decode.stats.clear()
        decode.run(decode.add_decode(prompt, prefill.prefill(prompt), 4, arrived=arrived))
        transfer = of_requests(decode)[-1]["disServingStats"]
        assert (transfer is not None) == (arrived is not None)
    assert transfer is not None
    assert 0 < transfer["kvCacheTransferMS"] < 20_000
    assert transfer["kvCacheSize"] > 0
    prefill.settle()


def test_waiting_requests_are_counted_too(decode: Core) -> None:
    first, second = (decode.add(PROMPT[i:], 3) for i in (0, 1))
    decode.step()
    stages = {entry["id"]: (entry["stage"], entry["scheduled"]) for entry in of_requests(decode)}
    assert stages == {first: ("GENERATION_IN_PROGRESS", True), second: ("QUEUED", False)}
    decode.run(first, second)
    assert of_requests(decode)[-1]["stage"] == "GENERATION_COMPLETE"


def test_paused_choice_is_marked_in_request_statistics(checkpoints: Checkpoints) -> None:
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    pool = {"max_tokens": 128, "tokens_per_block": 16, "enable_block_reuse": False}
    core = Core(
        checkpoints(),
        scheduler_config=policy,
        kv_cache_config=pool,
        max_seq_len=128,
        enable_iter_req_stats=True,
    )
    core.run(*(core.add(PROMPT, 40) for _ in range(2)))
    paused = [entry for entry in of_requests(core) if entry["paused"]]
    assert paused
    assert not any(entry["scheduled"] for entry in paused)
    core.close()


@pytest.mark.parametrize("prints", [True, False])
def test_each_step_can_be_logged(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, prints: bool
) -> None:
    caplog.set_level("INFO", logger="trtllm_disagg.engines.embedded.scheduler.statistics")
    core = Core(checkpoints(), print_iter_log=prints, enable_iter_perf_stats=False)
    core.generate(PROMPT, 3)
    lines = [message for message in caplog.messages if message.startswith("iter = ")]
    assert core.stats == []
    assert len(lines) == (3 if prints else 0)
    if prints:
        assert lines[0].startswith("iter = 1, num_scheduled_requests: 1, states = {num_ctx_requests: 1, ")
        assert "num_ctx_tokens: 40, num_generation_tokens: 0}, active: 1, queued: 0" in lines[0]
    core.close()


def test_the_engines_hit_rate_is_that_of_its_requests(checkpoints: Checkpoints) -> None:
    """Room for answers is no miss."""
    with closing(Core(checkpoints(), enable_iter_req_stats=True)) as core:
        prompt = [2 + i % 250 for i in range(129)]  # five blocks of 32, four of them full
        for _ in range(2):
            core.generate(prompt, 300)
    of_requests = {
        each["id"]: each for stat in core.stats for each in stat["requestStats"] if each["scheduled"]
    }
    per_request = [
        sum(each[f"{kind}BlocksPerRequest"] for each in of_requests.values()) for kind in ("reused", "missed")
    ]
    engine = core.stats[-1]["kvCacheStats"]
    assert per_request == [engine["reusedBlocks"], engine["missedBlocks"]] == [4, 6]
    assert engine["cacheHitRate"] == 0.4


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
    """As in the statistics of its request: whole blocks count."""
    with closing(Core(checkpoints(), kv_cache_config={"max_tokens": 4096, "tokens_per_block": 16})) as core:
        for number in range(5):
            core.generate([1, *range(10 * number + 2, 10 * number + 18)], 2)
    blocks = core.stats[-1]["kvCacheStats"]
    assert (blocks["reusedBlocks"], blocks["missedBlocks"]) == (0, 10)
