"""`trtllm-disagg plan`: which layout leads, and what it says without starting anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.tools.conftest import MODELLED
from trtllm_disagg import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.plan.comparison import LayoutComparison, LayoutResult, LayoutSimulation
from trtllm_disagg.tools.plan.layouts import one_of_each
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO
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


def test_plan_says_what_is_compared_its_times_at_each_rate_and_what_to_run(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    limits = ["--slo", "ttft=5000,tpot=13", "--rates", "0.5,4"]
    assert cli.run([*flags, *limits, "--workloads", "8192:256,chat", "--workers", "2"]) == 0
    output = capsys.readouterr().out
    rates, agg, pair = output.splitlines()[3:6]
    assert rates.split() == ["requests/s", "0.5", "4", "up", "to", "tok/s/GPU"]
    # Agg's tokens wait for other prompts, so at four requests a second it does not keep the limits.
    assert re.match(r"2 agg +\d{3} / 8\.\d+ +\d+ / [\d.]+\* +[\d.]+ +\d+ *$", agg)
    assert re.match(r"1P1D +\d{3} / 8\.\d+ +", pair)
    *_, own, chat = output.splitlines()
    subject = (
        f"2 GPUs ({tmp_path.name}; 8192:256: 8192 tokens in, 256 out; TTFT 5000 ms and TPOT 13 ms): run "
    )
    assert own.startswith(f"{subject}1P1D prefill_first up to ")
    assert "; 2 agg keep the limits up to " in own
    assert "chat: short chats, 256 tokens in, 256 out" in chat
    assert sorted(tmp_path.iterdir()) == before


def compared(*rates: float) -> LayoutComparison:
    """Under limits that 2 agg and 1P1D keep up to these rates."""
    results = {
        name: LayoutResult(name.split()[-1], rate, 1.0, 1.0, 1.0)
        for name, rate in zip(("2 agg", "1P1D"), rates, strict=True)
    }
    return LayoutComparison("m", "H200", 4, 2, "rag", "rag: 8 in", DEFAULT_SLO, 9.5, 3.0, results, ())


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((2.34, 4.51), "run 1P1D 1P1D up to 4.5 requests/s; 2 agg keep the limits up to 2.3"),
        ((130.4, 0.0), "run 2 agg up to 130 requests/s; 1P1D 1P1D keeps the limits at no rate"),
        (
            (4.0, 4.2),
            "run 1P1D 1P1D or 2 agg, up to 4.2 requests/s: less than 10% apart, which the simulation ",
        ),
        ((0.0, 0.0), "no layout keeps the limits at any rate; a lone request has TTFT 9.5 ms and TPOT 3 ms"),
    ],
)
def test_the_sentence_has_the_limits_and_what_the_other_kind_of_layout_does(
    rates: tuple[float, float], said: str
) -> None:
    sentence = compared(*rates).sentence()
    assert sentence.startswith(f"4 H200s, 2 a worker (m; rag: 8 in; TTFT 500 ms and TPOT 30 ms): {said}")


def test_a_picture_has_a_point_for_each_layout_at_each_rate(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    rates = ["--workloads", "chat,rag", "--workers", "2", "--rates", "1,2", "--plot", str(file)]
    assert cli.run([*flags, *rates]) == 0
    titles = [each.text or "" for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    assert [text for text in titles if ":" in text][:4] == [
        f"{name}: {rate}, {rate}" for name in ("2 agg", "1P1D") for rate in (1, 2)
    ]
    assert len(titles) == 2 * 2 * 3


def test_a_script_gets_rates_and_leads_as_json(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    limits = "ttft=5000,tpot=13"
    assert (
        cli.run([*flags, "--json", "--by-limits", "--workloads", "rag", "--workers", "2", "--slo", limits])
        == 0
    )
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
        (["--workloads", "9000:9000"], "--workloads: '9000:9000'"),
        (["--workloads", "chat", "--workers", "2", "--plot", "/nowhere/a.svg"], "--plot: '/nowhere/a.svg'"),
    ],
)
def test_wrong_setting_is_refused_by_its_flag(flags: list[str], more: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cli.run([*flags, *more])
