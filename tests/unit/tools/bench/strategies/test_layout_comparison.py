"""`bench strategies --foresee`: are its leads those of an event simulation that shares no code with it, and does it say
what there is to say without starting anything?
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import yaml

from tests.support.queueing_model import Gpu, Job, simulate_agg, simulate_pair
from trtllm_disagg import cli
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.layout_comparison import LayoutLead, LayoutSimulation, layouts
from trtllm_disagg.tools.bench.strategies.measures import Slo
from trtllm_disagg.tools.bench.strategies.simulation import ModelledWorker
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN

GPU = Gpu(
    step=8e-3, prompt_token=60e-6, answer_token=250e-6, bytes_per_token=131072, link_bytes=5e10, latency=1e-4
)
STEP_TIMES = {
    "step_ms": 8.0,
    "prefill_token_us": 60.0,
    "decode_token_us": 250.0,
    "kv_pool_tokens": 10**7,
    "kv_bytes_per_token": 131072,
}
MODELLED = {"measured": STEP_TIMES, "link_gb_per_second": 50.0, "link_latency_us": 100.0}
RAG = BUILT_IN["rag"]


@pytest.fixture(scope="module")
def told() -> LayoutSimulation:
    worker = ModelledWorker.of(
        {"model": "m", "max_batch_size": 2048, "max_num_tokens": 8192, "modelled": MODELLED}
    )
    return LayoutSimulation(layouts(2, 1), RAG, dict.fromkeys(("agg", "prefill", "decode"), worker))


def share_in_time(rate: float, slo: Slo, *, is_separate: bool) -> float:
    """By the other simulation, of one agg worker at half the rate, or of a pair."""
    asks = RAG.lengths(rate, 400)
    jobs = [Job(ask.arrival, len(ask.prompt), ask.output_tokens) for ask in asks]
    served = jobs if is_separate else jobs[::2]
    (simulate_pair if is_separate else simulate_agg)(GPU, served, 8192)
    assert slo.ttft is not None
    assert slo.tpot is not None
    return mean(1000 * job.ttft <= slo.ttft and 1000 * job.tpot <= slo.tpot for job in served)


@pytest.mark.parametrize(("factors", "layout"), [((10.0, 1.6), "1P1D"), ((2.0, 4.0), "2 agg")])
def test_the_layout_that_leads_keeps_the_objective_where_the_other_kind_does_not(
    told: LayoutSimulation, factors: tuple[float, float], layout: str
) -> None:
    slo = told.slo(*factors)
    lead = told.lead(slo)
    assert lead is not None
    assert lead.layout == layout
    rates = told.rates(slo)
    # Near a limit of 0.9 the two differ by what a request more or less is.
    rate = 0.95 * rates[layout]
    assert lead.ratio is None or lead.ratio > 1.2
    assert share_in_time(rate, slo, is_separate=lead.is_separate) >= 0.85
    assert share_in_time(rate, slo, is_separate=not lead.is_separate) < 0.9


def test_an_objective_below_what_a_request_takes_alone_is_kept_by_no_layout(told: LayoutSimulation) -> None:
    slo = told.slo(1.0, 0.9)
    assert told.rates(slo) == {"2 agg": 0.0, "1P1D": 0.0}
    assert told.lead(slo) is None


@pytest.mark.parametrize(
    ("lead", "said"),
    [
        (LayoutLead("1P1D", 1.84), "1P1D 1.8x"),
        (LayoutLead("2 agg", 1.09), "alike"),
        (LayoutLead("2 agg", None), "2 agg alone"),
    ],
)
def test_text_of_a_lead_has_layout_and_size(lead: LayoutLead, said: str) -> None:
    assert str(lead) == said


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3072, "max_position_embeddings": 16384}))
    for role in ("agg", "prefill", "decode"):
        content = {"max_seq_len": 16384, "modelled": MODELLED, "enable_chunked_prefill": True}
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(content))
    return ["bench", "strategies", "--model", str(tmp_path), "--engine-configs", str(tmp_path)]


def test_foresee_prints_every_layouts_rate_and_writes_no_file(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    assert cli.run([*flags, "--foresee", "--workloads", "rag", "--workers", "2,3"]) == 0
    output = capsys.readouterr().out
    for said in ("rag on 2 GPUs", "rag on 3 GPUs", "2 agg", "1P1D", "3 agg", "1P2D", "2P1D", "TPOT"):
        assert said in output
    assert max(map(len, output.splitlines())) <= 80
    assert sorted(tmp_path.iterdir()) == before


def test_a_script_gets_rates_and_leads_as_json(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    limits = "ttft=5000,tpot=13"
    assert (
        cli.run([*flags, "--foresee", "--json", "--workloads", "rag", "--workers", "2", "--slo", limits]) == 0
    )
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["workload"], told["gpus"], told["slo"]["tpot"]) == ("rag", 2, 13.0)
    assert told["rates"]["1P1D"] > told["rates"]["2 agg"] > 0
    assert {each["lead"]["layout"] for each in told["by_limits"] if each["lead"]} == {"1P1D", "2 agg"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "^--out is missing; .*--foresee alone needs none"),
        (["--json", "--out", "run"], "^--json needs --foresee.*report.json"),
        (["--foresee", "--url", "2 agg=http://127.0.0.1:1"], "--foresee: .*modelled GPUs"),
        (["--foresee", "--rates", "1"], "--rates: '1'.*beside --foresee"),
        (["--foresee", "--band", "0"], "--band: '0.0'.*beside --foresee"),
        (["--foresee", "--repetitions", "1"], "--repetitions: '1'.*beside --foresee"),
        (["--foresee", "--out", "run"], "--out: 'run'.*beside --foresee"),
        (["--advise", "--out", "run", "--slo", "ttft=1"], "--model: .*beside --advise"),
        (["--out", "run", "--gpus-per-worker", "2"], "^--gpus-per-worker needs --url"),
        (
            ["--url", "2 agg=http://127.0.0.1:1", "--out", "run", "--rates", "1"],
            "--engine-configs: .*beside --url",
        ),
    ],
)
def test_what_no_table_covers_or_has_no_place_is_refused(
    flags: list[str], more: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        cli.run([*flags, *more])
