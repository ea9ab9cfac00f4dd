"""Layouts of equal GPUs, from the one list of strategies."""

from __future__ import annotations

import pytest

from benchmarks.orders import chosen_layouts
from trtllm_disagg.config.deciders import DECIDERS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, run_by_workers
from trtllm_disagg.tools.plan.layouts import layouts_of, planned_layouts, worker_counts


@pytest.mark.parametrize(("workers", "gpus_each"), [(2, 1), (4, 1), (4, 8)])
def test_every_layout_has_the_same_gpus_and_all_workers(workers: int, gpus_each: int) -> None:
    for layout in layouts_of(workers, gpus_each):
        assert layout.gpus == workers * gpus_each
        assert layout.agg_workers + layout.prefill_workers + layout.decode_workers == workers


def test_every_strategy_and_every_decider_of_the_tables_is_a_layout() -> None:
    layouts = layouts_of(4)
    assert {layout.strategy for layout in layouts} == set(STRATEGIES)
    assert {layout.decider for layout in layouts} == set(DECIDERS)
    pairs = {(each.prefill_workers, each.decode_workers) for each in layouts if each.strategy == "router"}
    assert pairs == {(1, 3), (2, 2), (3, 1)}
    assert len({layout.name for layout in layouts}) == len(layouts)


def test_a_pattern_that_fits_no_layout_is_refused_with_the_layouts() -> None:
    with pytest.raises(ConfigError, match=r"--layouts: '5P\*'.*2 agg"):
        chosen_layouts(layouts_of(2), ["5P*"])


def test_one_worker_cannot_be_divided() -> None:
    assert [each.name for each in layouts_of(1, 8)] == ["1 agg"]


def test_plan_has_agg_and_each_order_with_every_number_of_workers_of_a_role() -> None:
    planned = planned_layouts(3, 2)
    assert {layout.workers for layout in planned} == {"3 agg", "1P2D", "2P1D"}
    assert {layout.strategy for layout in planned} == {"agg", *run_by_workers()}
    assert [each.name for each in planned if each.prefill_workers == 2] == [
        *("2P1D prefill_first", "2P1D decode_first length", "2P1D auto")
    ]


@pytest.mark.parametrize("text", ["", "1", "2,x", "-2", "2,1001"])
def test_a_wrong_number_of_workers_is_refused(text: str) -> None:
    assert worker_counts("2,4,2") == [2, 4]
    with pytest.raises(ConfigError, match="--workers"):
        worker_counts(text)
