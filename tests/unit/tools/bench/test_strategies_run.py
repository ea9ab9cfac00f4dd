"""`bench strategies`: what its flags ask for, what it refuses before anything starts, and the page of its results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from trtllm_disagg import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench import strategies
from trtllm_disagg.tools.bench.aiperf import RateResult
from trtllm_disagg.tools.bench.results import Row, write_results
from trtllm_disagg.tools.bench.sweeps import RunPlan, plan_of
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO

RESULT = RateResult(2.0, 0.5, 1.9, 400.0, 25.0, 100.0, 300.0, 40.0, 60.0, 0.0)
AGG = Layout("2 agg", "agg", agg_workers=2, gpus=2)
PAIR = Layout("1P1D <decode_first>", "decode_first", 0, 1, 1, 2)


@pytest.fixture
def flags(modelled_flags: list[str], tmp_path: Path) -> list[str]:
    return [*modelled_flags, "--out", str(tmp_path / "out")]


def planned(flags: list[str]) -> RunPlan:
    parser = cli.Parser()
    strategies.add_arguments(parser)
    return plan_of(parser.parse_args(flags))


def test_quick_run_has_every_order_at_rates_around_the_best_knee(flags: list[str]) -> None:
    plan = planned([*flags, "--quick"])
    assert [sweep.layout.name for sweep in plan.sweeps] == [
        "2 agg",
        *(f"1P1D {name}" for name in ("prefill_first", "decode_first", "router", "auto")),
    ]
    (rates,) = {sweep.rates for sweep in plan.sweeps}
    assert len(rates) == 4
    assert list(rates) == sorted(rates)
    assert (plan.requests, {sweep.traffic.name for sweep in plan.sweeps}) == (20, {"rag"})


def test_deployments_behind_urls_have_the_walls_clock(flags: list[str]) -> None:
    url = ["--url", "1P3D decode_first=http://a:1", "--rates", "1,2", "--gpus-per-worker", "2"]
    plan = planned([*flags, *url, "--workloads", "chat"])
    (sweep,) = plan.sweeps
    assert (plan.time_scale, sweep.layout.gpus, sweep.rates, plan.engines) == (1.0, 8, (1.0, 2.0), None)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--time-scale", "0"], "--time-scale"),
        (["--layouts", "9P*"], r"--layouts: '9P\*'"),
        (["--workers", "1"], "--workers: '1'"),
        (["--rates", "x"], "--rates: 'x'"),
        (["--url", "2 agg=ftp://a", "--rates", "1"], "--url"),
        (["--url", "pair=http://a", "--rates", "1"], "--url: 'pair'"),
        (["--url", "2 agg=http://a"], "--rates"),
        (["--url", "2 agg=http://a", "--url", "2 agg=http://b", "--rates", "1"], "each layout once"),
    ],
)
def test_wrong_setting_is_refused_by_its_flag(flags: list[str], more: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        planned([*flags, *more])


@pytest.mark.parametrize(
    "flag", ["--foresee", "--advise", "--arms=* agg", "--band=0", "--repetitions=2", "--json"]
)
def test_flag_that_is_gone_is_refused_with_what_to_use(flags: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]} is gone since 0.2: .*"):
        cli.run(["bench", "strategies", *flags, flag])


def test_results_are_on_the_modelled_clock_in_a_csv_a_json_and_a_page(tmp_path: Path) -> None:
    rows = [Row.of(layout, "chat", RESULT, scale=4.0) for layout in (AGG, PAIR)]
    page = write_results(tmp_path, "model on h100_sxm", DEFAULT_SLO, rows).read_text()
    assert rows[0].rate == 8.0
    assert (rows[0].goodput, rows[0].ttft_p50, rows[0].tokens_s_gpu) == (4.0, 25.0, 800.0)
    with (tmp_path / "results.csv").open() as file:
        assert [row["layout"] for row in csv.DictReader(file)] == ["2 agg", PAIR.name]
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2
    assert "<h2>chat on 2 GPUs</h2>" in page
    assert "1P1D &lt;decode_first&gt;" in page
    assert page.count("<svg") == 2
    assert "http" not in page
