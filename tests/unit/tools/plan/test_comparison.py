"""`trtllm-disagg plan`: which layout leads, and what it says without starting anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.tools.conftest import MODELLED, STEPS
from trtllm_disagg.common import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.plan import comparison
from trtllm_disagg.tools.plan.comparison import (
    AtRate,
    LayoutComparison,
    LayoutResult,
    LayoutSimulation,
    compare_layouts,
)
from trtllm_disagg.tools.plan.modelled_gpus import Division, Engines
from trtllm_disagg.tools.plan.simulation import ModelledWorker
from trtllm_disagg.tools.plan.slo import DEFAULT_SLO, Slo
from trtllm_disagg.tools.plan.workloads import BUILT_IN

RAG = BUILT_IN["rag"]


def simulated(ttft: float, tpot: float) -> LayoutSimulation:
    """Under limits that are factors of what a lone request takes."""
    worker = ModelledWorker.of(
        {"model": "m", "max_batch_size": 2048, "max_num_tokens": 8192, "modelled": MODELLED}
    )
    division = Division(
        2, Engines(Path("m"), {"agg": {}}), dict.fromkeys(("agg", "prefill", "decode"), worker)
    )
    slo = Slo(
        ttft * 1000 * worker.prefill_seconds(RAG.shape), tpot * 1000 * worker.token_seconds(RAG.shape, 1)
    )
    return LayoutSimulation(division, RAG, slo)


@pytest.mark.parametrize(("factors", "layout"), [((10.0, 1.6), "1P1D prefill_first"), ((2.0, 4.0), "2 agg")])
def test_the_layout_that_leads_keeps_the_objective_at_a_clearly_higher_rate(
    factors: tuple[float, float], layout: str
) -> None:
    results = simulated(*factors).found().layouts
    (other,) = {"2 agg", "1P1D prefill_first"} - {layout}
    assert results[layout].rate == max(each.rate for each in results.values())
    assert results[layout].rate > 1.2 * results[other].rate


@pytest.fixture
def flags(modelled_flags: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """With a fraction of the requests: for what is said, not for how precise it is."""
    monkeypatch.setattr(comparison, "_FEWEST_REQUESTS", 100)
    return ["plan", *modelled_flags]


def test_plan_says_what_is_compared_its_times_at_each_rate_and_what_to_run(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    limits = ["--slo", "ttft=5000,tpot=13", "--rates", "0.5,4"]
    assert cli.run([*flags, *limits, "--workloads", "8192:256,chat", "--workers", "2"]) == 0
    output = capsys.readouterr().out
    rates, agg, pair, *_ = output.splitlines()[3:]
    assert rates.split() == ["requests/s", "0.5", "4", "up", "to", "tok/s/GPU"]
    # Agg's tokens wait for other prompts, so at four requests a second it does not keep the limits.
    assert re.match(r"2 agg +\d{3} / 8\.\d+ +(\d+|>10 s) / [\d.]+\* +[\d.]+ +\d+ *$", agg)
    assert re.match(r"1P1D prefill_first +\d{3} / 8\.\d+ +", pair)
    *_, own, chat = output.splitlines()
    subject = (
        f"2 GPUs ({tmp_path.name}; 8192:256: 8192 tokens in, 256 out; TTFT 5000 ms and TPOT 13 ms): run "
    )
    assert own.startswith(f"{subject}1P1D prefill_first up to ")
    assert "; 2 agg keep the limits up to " in own
    assert ". The order: 1P1D " in own
    assert "chat: short chats, 256 tokens in, 256 out" in chat
    assert sorted(tmp_path.iterdir()) == before


PREFILL, DECODE = "1P1D prefill_first", "1P1D decode_first length"


def compared(*rates: float, orders: dict[str, AtRate] | None = None) -> LayoutComparison:
    """Under limits that agg and the pair, in each order, keep up to these rates."""
    results = {
        name: LayoutResult(name.split()[1], "always", 2, rate, 1.0, 1.0, 1.0)
        for name, rate in zip(("2 agg", PREFILL, DECODE), rates, strict=True)
    }
    alone, limits = (9.5, 3.0), DEFAULT_SLO
    return LayoutComparison("m", "H200", 4, "rag", "rag: 8 in", limits, *alone, results, orders or {})


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((2.34, 4.51, 1), f"run {PREFILL} up to 4.5 requests/s; 2 agg keep the limits up to 2.3"),
        ((130.4, 0.0, 0), f"run 2 agg up to 130 requests/s; {PREFILL} keeps the limits at no rate"),
        (
            (4.0, 1, 4.2),
            f"run {DECODE} or 2 agg, up to 4.2 and 4 requests/s: less than 10% apart, too little for the simulation",
        ),
        ((0, 0, 0), "no layout keeps the limits at any rate; a lone request has TTFT 9.5 ms and TPOT 3 ms"),
    ],
)
def test_the_sentence_has_the_limits_and_what_the_other_kind_of_layout_does(
    rates: tuple[float, ...], said: str
) -> None:
    sentence = compared(*rates).sentence()
    assert sentence.startswith(f"4 H200s, 2 a worker (m; rag: 8 in; TTFT 500 ms and TPOT 30 ms): {said}")


#: TTFT, TPOT, share in time, tokens computed and moved, share of one worker.
BY_PREFILL = AtRate(4.51, 700.4, 9.04, 0.5, 832, 1050, 0.0)
BY_DECODE = AtRate(4.51, 90.0, 12.0, 0.95, 610, 40, 0.88)


@pytest.mark.parametrize(
    ("rates", "orders", "said"),
    [
        (
            (1, 3.2, 4.51),
            {DECODE: BY_DECODE, PREFILL: BY_PREFILL},
            f"The order: {DECODE}, because it computes 610 prompt tokens a request instead of 832, it moves the KV of "
            "40 instead of 1050, and its decode workers prefill 88% of the requests themselves: at 4.5 requests/s it "
            f"has TTFT / TPOT 90 / 12 ms, and {PREFILL} 700 / 9.04 (up to 3.2)",
        ),
        (
            (1, 4.51, 3.2),
            {PREFILL: BY_PREFILL, DECODE: BY_DECODE},
            f"The order: {PREFILL}, because its decode steps do not wait for prompts, as they do for 88% of the "
            "requests in the other order: at 4.5 requests/s it has TTFT / TPOT 700 / 9.04 ms, and "
            f"{DECODE} 90 / 12 (up to 3.2)",
        ),
        (
            (1, 4.4, 4.51),
            {DECODE: BY_DECODE, PREFILL: BY_PREFILL},
            f"The order: {DECODE} or {PREFILL}, less than 10% apart, too little for the simulation to separate "
            "(610 and 832 prompt tokens computed a request, 40 and 1050 moved)",
        ),
    ],
)
def test_the_sentence_names_the_order_and_what_it_saves(
    rates: tuple[float, ...], orders: dict[str, AtRate], said: str
) -> None:
    assert compared(*rates, orders=orders).sentence().endswith(f". {said}")


def division(size: int, **steps: float) -> Division:
    """Four GPUs in workers of this size."""
    args = {"tensor_parallel_size": size, "max_num_tokens": 8192, "modelled": {"measured": STEPS | steps}}
    engines = Engines(Path("m"), dict.fromkeys(("agg", "prefill", "decode"), args))
    return Division(4, engines, engines.workers())


def test_the_best_size_of_worker_is_found_with_its_times_and_what_the_other_sizes_do() -> None:
    told: list[float] = []
    sizes = [
        division(1),
        division(2, step_ms=2.0, prefill_token_us=15.0, decode_token_us=50.0),
        division(4, kv_pool_tokens=100),
    ]
    (compared,) = compare_layouts(sizes, [RAG], Slo(ttft=2000, tpot=30), report=told.append)
    # The pool of four GPUs does not hold the longest request.
    assert {each.gpus_per_worker for each in compared.layouts.values()} == {1, 2}
    assert compared.layouts[compared.best].gpus_per_worker == 2
    assert compared.sentence().startswith(f"4 GPUs (m; {compared.description}; {compared.slo}): run ")
    assert f"run {compared.best} " in compared.sentence()
    shown = {name for name, each in compared.layouts.items() if each.at}
    assert shown == {name for name in compared.layouts if name.endswith(" TP2")}
    assert {name.removesuffix(" TP2") for name in shown} >= {"2 agg", "1P1D prefill_first", "1P1D auto"}
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_a_workload_that_no_pool_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'rag'.*at most 4000 tokens, the KV pool"):
        compare_layouts([division(2, kv_pool_tokens=4000)], [RAG], Slo(ttft=500))


def test_plan_tries_every_size_of_worker_for_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiconfigurator_core")
    flags = ["--gpus", "4", "--workloads", "2000:20", "--slo", "ttft=8000", "--json"]
    assert cli.run(["plan", "--model", "Qwen/Qwen3-235B-A22B-FP8", "--gpu", "h100_sxm", *flags]) == 0
    (compared,) = json.loads(capsys.readouterr().out)
    # Two GPUs do not hold the weights; four of them are one worker.
    assert list(compared["layouts"]) == ["1 agg"]
    assert compared["gpu"] == "H100"
    for wrong, named in (
        (["--tp", "2,16"], "--tp: '2,16'.*divide --gpus 4"),
        (["--gpu", "h100"], "--gpu: 'h100'"),
    ):
        with pytest.raises(ConfigError, match=f"^{named}"):
            cli.run(["plan", "--model", "llama-3.1-8b", *flags, *wrong])


def test_a_picture_has_a_point_for_each_layout_at_each_rate(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    rates = ["--workloads", "chat,rag", "--workers", "2", "--rates", "1,2", "--plot", str(file)]
    assert cli.run([*flags, *rates]) == 0
    titles = [each.text or "" for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    assert [text for text in titles if ":" in text][:4] == [
        f"{name}: {rate}, {rate}" for name in ("2 agg", "1P1D prefill_first") for rate in (1, 2)
    ]
    # Agg and three orders, each with two points and its name, of two workloads.
    assert len(titles) == 2 * 4 * 3


def test_a_script_gets_rates_and_orders_as_json(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    slo = ["--slo", "ttft=5000,tpot=13"]
    assert cli.run([*flags, "--json", "--workloads", "rag", "--workers", "2", *slo]) == 0
    (compared,) = json.loads(capsys.readouterr().out)
    assert (compared["workload"], compared["gpus"], compared["slo"]["tpot"]) == ("rag", 2, 13.0)
    layouts = compared["layouts"]
    assert layouts[PREFILL]["rate"] > layouts["2 agg"]["rate"] > 0
    assert layouts[PREFILL]["tpot"] <= 13
    assert (layouts[DECODE]["strategy"], layouts[DECODE]["decider"]) == ("decode_first", "length")
    assert {each["computed"] > 8000 for each in compared["orders"].values()} == {True}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--workers", "1"], "--workers: '1'"),
        (["--gpus", "4"], "--gpus: '4'.*--workers"),
        (["--workers", "2", "--tp", "2"], "--tp: '2'.*--gpus instead of --workers"),
        (["--workloads", "chat", "--turns", "4"], "--workloads: 'chat'.*--turns"),
        (["--workloads", "8:8", "--spread", "1"], "--spread: 1"),
        (["--workloads", "news"], "--workloads: 'news'"),
        (["--slo", "ttft"], "--slo: 'ttft'"),
        (["--override-engine-args", '{"modelled": {"system": "x"}, "max_seq_len": 1}'], "--workloads: 'chat"),
        (["--engine-configs", "/nowhere"], "--engine-configs: '/nowhere'"),
        (["--model", "/nowhere"], "--model: '/nowhere'"),
        (["--workloads", "9000:9000"], "--workloads: '9000:9000'"),
        (["--workloads", "rag", "--workers", "2", "--plot", "/nowhere/a.svg"], "--plot: '/nowhere/a.svg'"),
    ],
)
def test_wrong_setting_is_refused_by_its_flag(flags: list[str], more: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cli.run([*flags, *more])
