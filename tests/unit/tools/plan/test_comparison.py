"""`trtllm-disagg plan`: which layout leads, and what it says without starting anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.tools.conftest import MODELLED
from trtllm_disagg import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.plan.comparison import LayoutSimulation
from trtllm_disagg.tools.plan.layouts import one_of_each
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.plan.workloads import BUILT_IN

RAG = BUILT_IN["rag"]


@pytest.fixture(scope="module")
def simulated() -> LayoutSimulation:
    worker = ModelledWorker.of(
        {"model": "m", "max_batch_size": 2048, "max_num_tokens": 8192, "modelled": MODELLED}
    )
    return LayoutSimulation(one_of_each(2, 1), RAG, dict.fromkeys(("agg", "prefill", "decode"), worker))


@pytest.mark.parametrize(("factors", "layout"), [((10.0, 1.6), "1P1D"), ((2.0, 4.0), "2 agg")])
def test_the_layout_that_leads_keeps_the_objective_at_a_clearly_higher_rate(
    simulated: LayoutSimulation, factors: tuple[float, float], layout: str
) -> None:
    slo = simulated.slo(*factors)
    lead = simulated.lead(slo)
    assert lead is not None
    assert lead.layout == layout
    rates = simulated.rates(slo)
    assert rates[layout] == max(rates.values())
    assert lead.ratio is None or lead.ratio > 1.2


def test_an_objective_below_what_a_request_takes_alone_is_kept_by_no_layout(
    simulated: LayoutSimulation,
) -> None:
    slo = simulated.slo(1.0, 0.9)
    assert simulated.rates(slo) == {"2 agg": 0.0, "1P1D": 0.0}
    assert simulated.lead(slo) is None


@pytest.fixture
def flags(modelled_flags: list[str]) -> list[str]:
    return ["plan", *modelled_flags]


def test_plan_prints_every_layouts_rate_and_a_sentence_and_writes_no_file(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    assert cli.run([*flags, "--workloads", "rag", "--workers", "2,3"]) == 0
    output = capsys.readouterr().out
    for name in (
        "rag on 2 GPUs",
        "rag on 3 GPUs",
        "2 agg",
        "1P1D",
        "3 agg",
        "1P2D",
        "2P1D",
        "TPOT",
        "8192 in",
    ):
        assert name in output
    assert output.splitlines()[-1].startswith("rag on 3 GPUs")
    assert "step times of your own" in output
    assert ": run " in output or "no layout keeps the limits" in output
    assert sorted(tmp_path.iterdir()) == before


def test_a_script_gets_rates_and_leads_as_json(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    limits = "ttft=5000,tpot=13"
    assert cli.run([*flags, "--json", "--workloads", "rag", "--workers", "2", "--slo", limits]) == 0
    (compared,) = json.loads(capsys.readouterr().out)
    assert (compared["workload"], compared["gpus"], compared["slo"]["tpot"]) == ("rag", 2, 13.0)
    assert compared["layouts"]["1P1D"]["rate"] > compared["layouts"]["2 agg"]["rate"] > 0
    assert compared["layouts"]["1P1D"]["tpot"] <= 13
    assert {each["lead"]["layout"] for each in compared["by_limits"] if each["lead"]} == {"1P1D", "2 agg"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--workers", "1"], "--workers: '1'"),
        (["--workloads", "news"], "--workloads: 'news'"),
        (["--slo", "ttft"], "--slo: 'ttft'"),
        (
            ["--override-engine-args", '{"modelled": {"system": "abacus"}, "max_seq_len": 1}'],
            "--workloads: 'chat'",
        ),
        (["--engine-configs", "/nowhere"], "--engine-configs: '/nowhere'"),
        (["--model", "/nowhere"], "--model: '/nowhere'"),
    ],
)
def test_wrong_setting_is_refused_by_its_flag(flags: list[str], more: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cli.run([*flags, *more])
