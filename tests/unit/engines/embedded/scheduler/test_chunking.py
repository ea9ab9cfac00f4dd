"""How the prompts of a step share its budget."""

from __future__ import annotations

import pytest

from tests.support.scheduling import Engine, sequence


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("FIRST_COME_FIRST_SERVED", [(1, 128)]),
        ("EQUAL_PROGRESS", [(1, 64), (2, 40), (3, 10)]),
        ("FORCE_CHUNK", [(1, 32), (2, 32), (3, 10)]),
    ],
)
def test_prompts_share_a_step_by_the_chunking_policy(policy: str, shares: list[tuple[int, int]]) -> None:
    engine = Engine(64, args={"max_num_tokens": 128, "scheduler_config": {"context_chunking_policy": policy}})
    for request_id, num_prompt in ((1, 200), (2, 40), (3, 10)):
        engine.scheduler.add(sequence(request_id, num_prompt))
    assert [(row.sequence.request_id, row.num_tokens) for row in engine.step()] == shares
    engine.drain()
    assert sorted(engine.finished) == [1, 2, 3]


def test_a_prompt_that_the_budget_holds_runs_in_one_pass() -> None:
    engine = Engine(64, args={"max_num_tokens": 512})
    engine.scheduler.add(sequence(1, 500, request_type="context_only"))
    assert [row.num_tokens for row in engine.step()] == [500]
    assert engine.finished == [1]
