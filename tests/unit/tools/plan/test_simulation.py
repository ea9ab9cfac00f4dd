"""A layout as it is simulated, beside an event simulation that takes step after step and shares no code with it."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from tests.support.queueing_model import Gpu, Job, simulate_agg, simulate_pair
from trtllm_disagg.tools.plan.fleet import simulate
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.simulation import ModelledWorker, SimulatedPoint, knee
from trtllm_disagg.tools.plan.slo import Slo, done_share
from trtllm_disagg.tools.plan.workloads import BUILT_IN, Ask

GPU = Gpu(
    step=8e-3, prompt_token=60e-6, answer_token=250e-6, bytes_per_token=131072, link_bytes=5e9, latency=1e-4
)
AGG = Layout("1 agg", "agg", agg_workers=1)
PAIR = Layout("1P1D decode_first", "decode_first", prefill_workers=1, decode_workers=1, gpus=2)
SLO = Slo(ttft=400.0, tpot=20.0)


@pytest.fixture(scope="module")
def worker() -> ModelledWorker:
    measured = {"step_ms": 8.0, "prefill_token_us": 60.0, "decode_token_us": 250.0, "kv_pool_tokens": 10**7}
    modelled = {
        "measured": {**measured, "kv_bytes_per_token": 131072},
        "link_gb_per_second": 5.0,
        "link_latency_us": 100.0,
    }
    return ModelledWorker.of(
        {"model": "m", "max_batch_size": 2048, "max_num_tokens": 8192, "modelled": modelled}
    )


def drain_seconds(point: SimulatedPoint) -> float:
    """From the last arrival to the last answer."""
    return max(map(sum, zip(point.arrivals, point.times["latency"], strict=True))) - point.arrivals[-1]


@pytest.mark.parametrize("rate", [4.0, 12.0, 20.0, 40.0])
@pytest.mark.parametrize("workload", ["chat", "bursts"])
@pytest.mark.parametrize("layout", [AGG, PAIR], ids=lambda layout: layout.name)
def test_the_goodput_and_the_drain_of_the_quick_simulation_are_those_of_the_other_one(
    layout: Layout, workload: str, rate: float, worker: ModelledWorker
) -> None:
    traffic = BUILT_IN[workload]
    asks = traffic.asks(rate, 400)
    jobs = [Job(ask.arrival, ask.prompt_tokens, ask.output_tokens) for ask in asks]
    (simulate_agg if layout is AGG else simulate_pair)(GPU, jobs, 8192)
    in_time = mean(job.ttft <= 0.4 and job.tpot <= 0.02 for job in jobs)
    done = done_share([job.arrival for job in jobs], [job.tokens[-1] - job.arrival for job in jobs])
    workers = dict.fromkeys(("agg", "prefill", "decode"), worker)
    simulated = simulate(layout, workers, asks)
    assert simulated.goodput_share(SLO) == pytest.approx(min(in_time, done), abs=0.05)
    drain = max(job.tokens[-1] for job in jobs) - jobs[-1].arrival
    assert drain_seconds(simulated) == pytest.approx(drain, rel=0.05)


@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (1, 3)])
def test_the_one_link_in_or_out_of_a_worker_takes_one_transfer_after_the_other(
    prefill: int, decode: int, worker: ModelledWorker
) -> None:
    layout = Layout(
        f"{prefill}P{decode}D", "decode_first", prefill_workers=prefill, decode_workers=decode, gpus=4
    )
    slow = replace(
        worker, gpus=replace(worker.gpus, facts=replace(worker.gpus.facts, link_bytes_per_second=1e9))
    )
    asks = BUILT_IN["rag"].asks(1000.0, 20)
    simulated = simulate(layout, dict.fromkeys(("prefill", "decode"), slow), asks)
    seconds = sum(ask.prompt_tokens for ask in asks) * 131072 / 1e9
    assert asks[-1].arrival + drain_seconds(simulated) > seconds


def test_an_answer_of_one_token_ends_with_its_prefill(worker: ModelledWorker) -> None:
    asks = [Ask(float(second), 4096, 1) for second in range(10)]
    simulated = simulate(PAIR, dict.fromkeys(("prefill", "decode"), worker), asks)
    assert simulated.times["latency"] == simulated.times["ttft"]
    assert simulated.goodput_share(SLO) == 1


@pytest.mark.parametrize("first_guess", [0.7, 1.0, 9.0, 11.0, 100.0])
def test_the_knee_is_found_from_either_side(first_guess: float) -> None:
    found = knee(first_guess, lambda rate: 1.0 if rate <= 10 else 10 / rate - 0.1)
    assert 9.5 <= found <= 10


def test_where_no_rate_is_good_enough_or_every_one_is_the_search_ends() -> None:
    assert 0 < knee(16.0, lambda rate: 0.0) <= 1
    assert knee(1.0, lambda rate: 1.0) == 16
