"""Rates of a sweep, by what the arms should be able to do."""

from __future__ import annotations

from trtllm_disagg.tools.bench.strategies.planning import (
    deciding,
    full_sweep,
    quick_sweep,
    up_to_the_first_above,
)

APART = {"fast": 10.0, "slow": 5.0}
NEAR = {"fast": 10.0, "slow": 9.0}


def test_a_quick_sweep_lies_on_both_sides_of_what_arms_that_differ_are_able_to_do() -> None:
    below_slow, between, above = quick_sweep(APART)
    assert below_slow < 5 < between < 10 < above


def test_a_quick_sweep_of_arms_that_are_near_each_other_has_a_calm_rate_and_one_on_each_side() -> None:
    calm, below, above = quick_sweep(NEAR)
    assert calm < below < 9 < 10 < above


def test_a_side_of_the_band_is_decided_at_a_rate_that_only_the_best_arm_is_able_to_do() -> None:
    (between,) = deciding(APART)
    assert 5 < between < 10


def test_a_side_on_which_arms_are_near_each_other_has_a_rate_that_all_are_able_to_do_and_one_above() -> None:
    below, above = deciding(NEAR)
    assert below < 9 < 10 < above


def test_seven_point_sweep_spans_both_knees() -> None:
    assert len(full_sweep(NEAR)) == 7
    assert full_sweep(NEAR)[0] < 2 < 11 < full_sweep(NEAR)[-1]


def test_an_arm_is_measured_up_to_the_first_rate_that_is_surely_above_what_it_is_able_to_do() -> None:
    common = (3.0, 6.0, 9.0, 11.0)
    assert up_to_the_first_above(10.0, common) == common
    assert up_to_the_first_above(2.5, common) == (3.0, 6.0)
    # 4 by the tables may be 5 in truth, and 6 seem exhausting to a short run.
    assert up_to_the_first_above(4.0, common) == (3.0, 6.0, 9.0)
