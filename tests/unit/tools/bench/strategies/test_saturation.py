"""What an arm does when more comes than it is able to do."""

from __future__ import annotations

import pytest

from trtllm_disagg.tools.bench.strategies.measures import done_share


def share_of(latencies: list[float], rate: float = 1.0) -> float:
    return done_share([i / rate for i in range(len(latencies))], latencies)


def behind(rate: float, able: float, answer: float, count: int) -> list[float]:
    """Answers of so many seconds, of which only `able` a second may begin."""
    return [answer + i * (1 / able - 1 / rate) for i in range(count)]


def test_done_share_of_an_arm_that_keeps_up_is_1() -> None:
    assert share_of([3.0] * 40) == 1
    assert share_of([3.0 + (i % 5) for i in range(40)]) == 1
    assert share_of([3.0] * 7) == 1


@pytest.mark.parametrize("able", [0.3, 0.5, 0.8])
def test_done_share_of_an_arm_that_falls_behind_is_its_capacity(able: float) -> None:
    assert share_of(behind(1.0, able, 4.0, 200)) == pytest.approx(able, abs=0.05)


def test_an_arm_that_stalls_after_its_first_token_is_full_long_before_its_answers_are_late() -> None:
    """Requests of 1.5 s at 187 a second, of which 128 are done: the last one waits 2.5 s, which 256 tokens hide."""
    assert share_of(behind(187.0, 128.0, 1.5, 1000), 187.0) == pytest.approx(128 / 187, abs=0.05)


def test_answers_that_only_grow_while_a_batch_fills_are_no_sign_of_it() -> None:
    assert share_of([2.0 + min(0.8, i / 100) for i in range(200)], rate=20.0) == 1


def test_where_few_end_in_time_because_answers_are_long_it_takes_more_growth() -> None:
    assert share_of([20.0 + 0.3 * i for i in range(14)]) == 1
    assert share_of([2.0 + 2 * i for i in range(14)]) < 0.5
