"""`bench strategies`: what its flags ask for, what it refuses before anything starts, and the page of its results."""

from __future__ import annotations

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trtllm_disagg import cli
from trtllm_disagg.engines.modelled.tables import PACKAGE
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench import strategies
from trtllm_disagg.tools.bench.aiperf import LoadFailedError, RateResult
from trtllm_disagg.tools.bench.results import Row, write_results
from trtllm_disagg.tools.bench.sweeps import RunPlan, plan_of
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO

#: As AIPerf writes it.
EXPORT: dict[str, Any] = {
    "input_config": {"phases": [{"rate": 2.0}]},
    "request_throughput": {"avg": 1.9},
    "request_error_rate": {"avg": 0.0},
    "good_request_fraction": {"avg": 0.5},
    "output_token_throughput": {"avg": 400.0},
    "output_token_throughput_per_user": {"p50": 25.0},
    "time_to_first_token": {"p50": 100.0, "p99": 300.0},
    "inter_token_latency": {"p50": 40.0, "p99": 60.0},
}
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
        (["--url", "pair=http://a", "--rates", "1"], "--url: 'pair=http://a'"),
        (["--url", "2 agg=http://a"], "--rates"),
        (["--url", "2 agg=http://a", "--url", "2 agg=http://b", "--rates", "1"], "each layout once"),
    ],
)
def test_wrong_setting_is_refused_by_its_flag(flags: list[str], more: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        planned([*flags, *more])


@pytest.mark.parametrize("more", [[], ["--rates", "1"]])
def test_missing_tables_are_named_before_a_worker_starts(
    flags: list[str], more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_own = [
        "--override-engine-args",
        '{"modelled": {"measured": null, "system": "l40s", "model": "deepseek-r1"}}',
    ]
    if find_spec(PACKAGE) is not None:
        with pytest.raises(ConfigError, match="no table has deepseek-r1 on l40s"):
            planned([*flags, *more, *no_own])
    monkeypatch.setattr("trtllm_disagg.engines.modelled.build.PACKAGE", "not_installed")
    with pytest.raises(ConfigError, match="the tables of GPUs' step times are not installed"):
        planned([*flags, *more, *no_own])


@pytest.mark.parametrize(
    "flag", ["--foresee", "--advise", "--arms=* agg", "--band=0", "--repetitions=2", "--json"]
)
def test_flag_that_is_gone_is_refused_with_what_to_use(flags: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag.partition('=')[0]} is gone since 0.2: .*"):
        cli.run(["bench", "strategies", *flags, flag])


def aiperf_in(directory: Path, fails_for: str = "none") -> Path:
    """A command that writes one result; it fails for a sweep whose folder's name has `fails_for`."""
    file = directory / "aiperf"
    file.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nplace = pathlib.Path(sys.argv[-1])\n"
        f"if {fails_for!r} in place.name: sys.exit('no such model')\n"
        f"(place / 'profile_export_aiperf.json').write_text({json.dumps(EXPORT)!r})\n"
    )
    file.chmod(0o755)
    return file


def behind_urls(flags: list[str], aiperf: Path) -> list[str]:
    urls = ["--url", "2 agg=http://a:1", "--url", "1P1D router=http://b:1"]
    return ["bench", "strategies", *flags, *urls, "--rates", "2", "--aiperf", str(aiperf)]


def test_each_deployment_serves_all_workloads_before_the_next_one_starts(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*behind_urls(flags, aiperf_in(tmp_path)), "--workloads", "chat,bursts"]) == 0
    said = capsys.readouterr().err.splitlines()[2:]
    assert said == [
        text
        for name in ("2 agg", "1P1D router")
        for text in (f"{name}: starting", f"{name}: chat", f"{name}: bursts")
    ]


def test_a_failed_sweep_leaves_the_results_before_it_and_is_repeated(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*behind_urls(flags, aiperf_in(tmp_path, fails_for="router")), "--workloads", "chat"]
    with pytest.raises(LoadFailedError, match="no such model"):
        cli.run(argv)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["layout"] for row in rows] == ["2 agg"]
    aiperf_in(tmp_path)
    assert cli.run(argv) == 0
    assert "2 agg: starting" not in capsys.readouterr().err.partition("router: starting")[2]
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["layout"] for row in rows] == ["2 agg", "1P1D router"]


def test_a_directory_with_other_settings_is_refused(flags: list[str], tmp_path: Path) -> None:
    argv = [*behind_urls(flags, aiperf_in(tmp_path)), "--workloads", "chat"]
    assert cli.run(argv) == 0
    with pytest.raises(ConfigError, match="--out"):
        cli.run([*argv, "--requests", "7"])


def test_results_are_on_the_modelled_clock_in_a_csv_a_json_and_a_page(tmp_path: Path) -> None:
    result = msgspec.convert(EXPORT, RateResult)
    rows = [Row.of(layout, "chat", result, scale=4.0) for layout in (AGG, PAIR)]
    page = write_results(tmp_path, "model on h100_sxm", DEFAULT_SLO, rows).read_text()
    assert rows[0].rate == 8.0
    assert (rows[0].goodput, rows[0].ttft_p50, rows[0].tokens_s_gpu) == (4.0, 25.0, 800.0)
    with (tmp_path / "results.csv").open() as file:
        assert [row["layout"] for row in csv.DictReader(file)] == ["2 agg", PAIR.name]
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2
    assert "chat on 2 GPUs" in page
    # Both are Pareto points, as they are equal.
    assert "1P1D &lt;decode_first&gt; *" in page
    # Each layout has a point in both charts, which says what it is.
    assert page.count("<title>2 agg: 8, 4</title>") == page.count("<title>2 agg: 100, 800</title>") == 1
    assert page.count("<svg") == 2
    assert "src=" not in page
