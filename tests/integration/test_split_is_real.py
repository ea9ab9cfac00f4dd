"""Prefill happens on prefill workers, decode on decode workers, and KV really travels: seen from outside."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping

import pytest

from tests.support.deployments import DISAGGREGATED, MODEL_NAME, Served, demo_model, wait_until

BLOCK = 16  # tokens, as engine_configs/demo says
TOKENS = 12

_FIRST = itertools.count(1300)

Work = dict[str, float]
COUNTERS = ("prefill_tokens", "decode_tokens", "kv_pulls", "kv_bytes_pulled")


def work_of(deployed: Served, role: str) -> Work:
    workers = deployed.of_role(role)
    return {name: deployed.total(f"trtllm_disagg_{name}_total", workers) for name in COUNTERS}


def work(prefill: float = 0, decode: float = 0, pulls: float = 0, blocks: float = 0) -> Work:
    return dict(zip(COUNTERS, (prefill, decode, pulls, blocks * bytes_per_block()), strict=True))


def bytes_per_block() -> int:
    model = json.loads((demo_model() / "config.json").read_text())
    return int(
        2 * 4 * BLOCK * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    )  # K and V, in float32


def complete(deployed: Served, prompt: list[int]) -> None:
    deployed.openai.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )


def fresh_prompt(count: int) -> list[int]:
    """Not even its first token is that of an earlier one: the start of a block would be reused."""
    return [next(_FIRST), *random.choices(range(300, 1300), k=count - 1)]


def assert_work(deployed: Served, before: Mapping[str, Work], expected: Mapping[str, Work]) -> None:
    """Statistics come a moment after the answer; what is too much stays too much."""

    def done() -> dict[str, Work]:
        now = {role: work_of(deployed, role) for role in before}
        return {
            role: {name: now[role][name] - count for name, count in counts.items()}
            for role, counts in before.items()
        }

    deployed.wait_until_idle()
    wait_until(lambda: done() == expected, f"{expected}, it is {done()}")


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_each_phase_runs_on_its_workers_engine_and_cached_blocks_are_not_moved_again(
    strategy: str, deployed: Served
) -> None:
    deployed.wait_until_idle()
    before = {role: work_of(deployed, role) for role in ("prefill", "decode")}
    prompt = fresh_prompt(300)

    complete(deployed, prompt)

    # The first token is prefill's, and comes with the prompt's last.
    one_by_one = work(decode=TOKENS - 1, pulls=1, blocks=math.ceil(300 / BLOCK))
    assert_work(deployed, before, {"prefill": work(prefill=300), "decode": one_by_one})

    complete(deployed, prompt)

    once_and_the_end = work(decode=2 * (TOKENS - 1), pulls=2, blocks=math.ceil(300 / BLOCK) + 1)
    prefilled = work(prefill=300 + 300 % BLOCK)
    assert_work(deployed, before, {"prefill": prefilled, "decode": once_and_the_end})
