"""Arms at equal GPUs, from the one list of strategies."""

from __future__ import annotations

import pytest

from trtllm_disagg.config.deciders import DECIDERS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, disaggregated, worker_side
from trtllm_disagg.tools.bench.strategies.arms import DEFAULT_PATTERNS, arms_at, choose


@pytest.mark.parametrize(("workers", "gpus_each"), [(2, 1), (4, 1), (4, 8)])
def test_every_arm_has_the_same_gpus_and_all_workers(workers: int, gpus_each: int) -> None:
    for arm in arms_at(workers, gpus_each):
        assert arm.gpus == workers * gpus_each
        assert arm.agg_workers + arm.prefill_workers + arm.decode_workers == workers


def test_every_strategy_and_every_decider_of_the_tables_is_an_arm() -> None:
    arms = arms_at(4)
    assert {arm.strategy for arm in arms} == set(STRATEGIES)
    assert {arm.decider for arm in arms if arm.strategy in worker_side()} == set(DECIDERS)
    layouts = {(arm.prefill_workers, arm.decode_workers) for arm in arms if arm.strategy == "router"}
    assert layouts == {(1, 3), (2, 2), (3, 1)}
    assert len({arm.name for arm in arms}) == len(arms)


def test_only_strategies_whose_workers_call_get_flags_of_orchestration() -> None:
    for arm in arms_at(2):
        assert bool(arm.flags) == (arm.strategy in worker_side())
        assert ("--prefill-decider" in arm.flags) == (arm.decider != "always")


def test_without_patterns_each_strategy_is_there_once_per_layout() -> None:
    names = [arm.name for arm in choose(arms_at(2), DEFAULT_PATTERNS)]
    assert names == ["2 agg", *(f"1P1D {name}" for name in disaggregated())]


def test_a_pattern_that_fits_no_arm_is_refused_with_the_arms() -> None:
    with pytest.raises(ConfigError, match=r"--arms: '5P\*'.*2 agg"):
        choose(arms_at(2), ["5P*"])


def test_one_worker_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match="--workers: 1"):
        arms_at(1)
