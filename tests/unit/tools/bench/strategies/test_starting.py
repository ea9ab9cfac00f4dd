"""`bench strategies` before anything runs: what it will measure, what it refuses, and what it goes on with."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.tools.bench.strategies.synthetic import Behaviour, result_of
from trtllm_disagg.engines.modelled.build import open_gpus
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.engines.modelled.factors import Factors
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.tools.bench.models import vocab_size
from trtllm_disagg.tools.bench.strategies import add_arguments, settle, simulation, starting
from trtllm_disagg.tools.bench.strategies.aiperf import AIPerf, LoadFailedError
from trtllm_disagg.tools.bench.strategies.measures import Slo
from trtllm_disagg.tools.bench.strategies.measuring import Schedule, Target
from trtllm_disagg.tools.bench.strategies.planning import scale_for, sensitivities
from trtllm_disagg.tools.bench.strategies.records import (
    NOMINAL,
    Arm,
    Plan,
    Point,
    PointResult,
    RequestRecord,
    RunDirectory,
    Sensitivity,
    Software,
    Workload,
)
from trtllm_disagg.tools.bench.strategies.running import Deployments, Key, Progress, Runner, batches, duration
from trtllm_disagg.tools.bench.strategies.simulation import (
    ModelledWorker,
    SimulatedPoint,
    requests_to_fill,
    simulate,
)
from trtllm_disagg.tools.bench.strategies.starting import check, runner_of_engines, runner_of_urls, why_long
from trtllm_disagg.tools.bench.strategies.sweep import sweeps_of
from trtllm_disagg.tools.bench.strategies.verdict import goodput, judge
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN, Ask

AIPERF = AIPerf(Path("aiperf"))
MEASURED = {
    "step_ms": 8.0,
    "prefill_token_us": 60.0,
    "decode_token_us": 250.0,
    "kv_pool_tokens": 100_000,
    "kv_bytes_per_token": 100_000,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 3072, "max_position_embeddings": 16384}))
    return directory


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    directory = tmp_path / "configs"
    directory.mkdir()
    for role in ("agg", "prefill", "decode"):
        content = {
            "max_seq_len": 16384,
            "modelled": {"measured": MEASURED},
            "enable_chunked_prefill": True,
            "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 60_000},
        }
        (directory / f"{role}.yaml").write_text(yaml.safe_dump(content))
    return directory


def parsed(model: Path, configs: Path, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = str(model.parent / "out")
    args = parser.parse_args(["--model", str(model), "--engine-configs", str(configs), "--out", out, *flags])
    settle(args)
    check(args)
    return args


def prepared(model: Path, configs: Path, *flags: str) -> Runner:
    args = parsed(model, configs, *flags)
    return (runner_of_urls if args.url else runner_of_engines)(args, AIPERF, RunDirectory(args.out))


def workers_of(runner: Runner) -> dict[str, ModelledWorker]:
    assert isinstance(runner.targets, Deployments)
    return runner.targets.engines.workers()


def test_all_arms_get_the_same_rates_prompts_and_arrivals(model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--workers", "2", "--workloads", "chat", "--band", "0")
    by_arm: dict[str, set[float]] = {}
    for point in runner.plan.points:
        by_arm.setdefault(point.arm, set()).add(point.rate)
    longest = max(by_arm.values(), key=len)
    assert all(rates_of <= longest and len(rates_of) >= 2 for rates_of in by_arm.values())
    first = {point.arm: point for point in reversed(runner.plan.points)}
    schedules = {arm: runner.asks(point) for arm, point in first.items()}
    assert len(set(schedules.values())) == 1
    repeated = [point for point in runner.plan.points if point.repetition == 1]
    assert runner.asks(repeated[0]) not in schedules.values()


def test_rates_of_the_band_follow_its_step_times(model: Path, configs: Path) -> None:
    """Arms that are faster have to be asked for more, or nothing is learned of what they can do."""
    runner = prepared(model, configs, "--workers", "2", "--workloads", "rag")
    highest = {
        variant: max(point.rate for point in runner.plan.points if point.sensitivity == variant)
        for variant in sensitivities(0.5)
    }
    assert highest[Sensitivity(0.5, 1)] > 1.3 * highest[NOMINAL] > 1.3 * highest[Sensitivity(1.5, 1)]


def test_by_itself_a_point_has_as_many_requests_as_come_while_two_answers_are_made(
    model: Path, configs: Path
) -> None:
    runner = prepared(model, configs, "--quick", "--workloads", "chat", "--requests", "auto")
    sent: dict[tuple[float, Sensitivity], set[int]] = {}
    for point in runner.plan.points:
        assert len(runner.asks(point)) == point.requests
        sent.setdefault((point.rate, point.sensitivity), set()).add(point.requests)
    assert all(len(counts) == 1 for counts in sent.values()), "arms are sent the same"
    (worker, *_) = workers_of(runner).values()
    shape = runner.traffics["chat"].shape
    rates_of = sorted(rate for rate, side in sent if side == NOMINAL)
    for rate in rates_of:
        (requests,) = sent[rate, NOMINAL]
        assert requests >= max(14, 2 * rate * worker.isolated_seconds(shape))
    assert max(sent[rates_of[-1], NOMINAL]) > max(sent[rates_of[0], NOMINAL])


@pytest.mark.parametrize("workload", ["chat", "reasoning"])
def test_a_quick_run_has_one_speed_however_many_requests_its_sides_need(
    workload: str, model: Path, configs: Path
) -> None:
    runner = prepared(model, configs, "--quick", "--workloads", workload, "--requests", "auto")
    assert len({point.requests for point in runner.plan.points}) > 3
    assert len({point.time_scale for point in runner.plan.points}) == 1
    assert len(runner.groups()) == 3


def test_a_quick_point_of_bursts_has_enough_of_them_to_arrive_at_its_rate(model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--quick", "--workloads", "bursts", "--band", "0")
    for point in runner.plan.points:
        asks = runner.asks(point)
        assert asks[-1].arrival == pytest.approx(len(asks) / point.rate, rel=0.3)


def test_arms_that_differ_in_their_order_only_are_simulated_once(
    model: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, tuple[Ask, ...]]] = []

    def counting(arm: Arm, workers: dict[str, ModelledWorker], asks: tuple[Ask, ...]) -> SimulatedPoint:
        seen.append((arm.name, asks))
        return simulate(arm, workers, asks)

    monkeypatch.setattr(simulation, "simulate", counting)
    prepared(model, configs, "--quick", "--band", "0")
    assert {name.split()[0] for name, _ in seen} == {"2", "1P1D"}
    assert len({name for name, _ in seen}) == 2
    assert len(set(seen)) == len(seen)


def test_by_itself_a_point_of_agents_lasts_longer_than_a_conversation(model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--quick", "--workloads", "agentic", "--requests", "auto")
    traffic = runner.traffics["agentic"]
    for point in runner.plan.points:
        assert runner.asks(point)[-1].arrival > 1.4 * traffic.session_s


def test_requests_at_once_and_the_time_of_one_fit_together(model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--quick")
    workers = workers_of(runner)
    worker, shape = workers["agg"], runner.traffics["rag"].shape
    assert worker.loaded_seconds(shape, 1e-6) == worker.isolated_seconds(shape)
    step = worker.decode_seconds(shape)
    for rate in (0.1 / step, 0.3 / step):
        seconds = worker.loaded_seconds(shape, rate)
        assert worker.isolated_seconds(shape) <= seconds <= worker.loaded_seconds(shape, 1.5 * rate)
    agg, pair = (runner.plan.arm(name) for name in ("2 agg", "1P1D decode_first"))
    full = 9 / step
    twice = requests_to_fill(pair, shape, workers, 2 * full)
    assert twice == pytest.approx(2 * requests_to_fill(pair, shape, workers, full), abs=1)
    assert requests_to_fill(agg, shape, workers, 0.1 / step) < requests_to_fill(
        agg, shape, workers, 0.2 / step
    )


def test_a_deployment_serves_all_points_of_its_arm_sensitivity_and_speed(model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--workers", "2", "--workloads", "chat,rag", "--time-scale", "4")
    groups = batches(runner.plan.points)
    assert len(groups) == 5 * 5  # arms and sensitivities
    assert [key[1] for key, _ in groups[:5]] == [NOMINAL] * 5
    assert {point.workload for point in groups[0][1]} == {"chat", "rag"}


def test_a_quick_run_has_three_rates_and_the_band_in_one_deployment_an_arm(
    model: Path, configs: Path
) -> None:
    runner = prepared(model, configs, "--quick")
    assert {arm.name for arm in runner.plan.arms} == {"2 agg", "1P1D prefill_first", "1P1D decode_first"}
    groups = runner.groups()
    assert len(groups) == 3
    for _, points in groups:
        sides = [point.sensitivity for point in points]
        assert tuple(dict.fromkeys(sides)) == sensitivities(0.5)
        assert sides.count(NOMINAL) == 3
    assert len({point.time_scale for point in runner.plan.points}) == 1
    # What one point has left in the caches is of no use to another.
    given = prepared(model, configs, "--quick", "--rates", "1", "--out", f"{model.parent / 'given'}")
    ((_, at_one_rate), *_) = given.groups()
    prompts = [ask.prompt for point in at_one_rate for ask in given.asks(point)]
    assert len(set(prompts)) == len(prompts)
    nominal, slower = groups[0][1][2], next(p for p in groups[0][1] if p.sensitivity.prefill_factor > 1)
    assert slower.rate < nominal.rate


@pytest.mark.parametrize(("given", "with_fast_decode"), [(0.25, 0.5), (0.8, 1.0), (2.0, 2.0)])
def test_a_clock_faster_than_the_walls_is_slower_where_decode_steps_are_shorter(
    given: float, with_fast_decode: float, model: Path, configs: Path
) -> None:
    runner = prepared(model, configs, "--quick", "--time-scale", f"{given:g}")
    scales = {point.sensitivity: point.time_scale for point in runner.plan.points}
    assert scales.pop(Sensitivity(1.0, 0.5)) == with_fast_decode
    assert set(scales.values()) == {given}


def test_the_expected_wall_time_is_the_sum_of_starts_arrivals_and_pauses(model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--quick", "--time-scale", "2", "--arms", "2 agg")
    ((_, points),) = runner.groups()
    expected, end = 8.0, 0.0
    for number, point in enumerate(points):
        if number:
            expected += 0.15 * end + 1.25 * points[number - 1].drain_s * 2 + 2.0
        end = runner.asks(point)[-1].arrival * 2
        expected += end
    assert runner.progress().remaining_seconds() == pytest.approx(60.0 + expected, rel=0.1)


def test_a_quick_run_is_expected_to_end_within_ten_minutes(model: Path, configs: Path) -> None:
    """With a model of 8 billion parameters on an H100, by straight lines through what the tables say of it."""
    like_tables = {
        "step_ms": 6.0,
        "prefill_token_us": 24.0,
        "decode_token_us": 330.0,
        "kv_pool_tokens": 430_000,
    }
    for file in configs.iterdir():
        content = yaml.safe_load(file.read_text())
        content["modelled"]["measured"] = MEASURED | like_tables
        file.write_text(yaml.safe_dump(content))
    runner = prepared(model, configs, "--quick", "--time-scale", "3")
    assert runner.progress().remaining_seconds() < 600


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (59, "0 min 59 s"),
        (7199, "119 min 59 s"),
        (7200, "2 h 00 min"),
        (172_799, "47 h 59 min"),
        (3_060_000, "35 days"),
    ],
)
def test_remaining_time_is_shown_in_fitting_units(seconds: int, said: str) -> None:
    assert duration(seconds) == said


def test_a_batch_that_takes_longer_or_is_repeated_leaves_the_time_of_the_others_as_it_was() -> None:
    now, out = 1000.0, io.StringIO()
    progress = Progress(3, out, sending=[200.0], took=[10.0], clock=lambda: now)
    progress.begin("2 agg: 2 points", 100.0)
    assert progress.remaining_seconds() == 10 + 100 + 10 + 200
    now += 500
    assert progress.remaining_seconds() == 10 + 200
    progress.end(measured=1)
    assert progress.took == [10.0, 400.0]
    progress.begin("2 agg: 1 points, again", 150.0)
    assert progress.remaining_seconds() == 150 + 205 + 205 + 200
    progress.sending.clear()
    now += 1000
    progress.say()
    assert out.getvalue().splitlines()[-1] == "[1/3 points] 2 agg: 1 points, again: longer than planned"


def test_before_its_first_point_a_run_says_what_it_waits_for() -> None:
    out = io.StringIO()
    Progress(3, out, sending=[90.0], took=[10.0]).say()
    assert out.getvalue() == "[0/3 points] asking AIPerf for its version: about 1 min 40 s left\n"


def test_each_change_of_what_is_measured_is_printed_at_once() -> None:
    out = io.StringIO()
    progress = Progress(3, out, sending=[], took=[10.0], clock=lambda: 1000.0)
    progress.begin("2 agg: starting", 100.0)
    progress.go_on("2 agg: 2 points, chat")
    assert out.getvalue().splitlines() == [
        "[0/3 points] 2 agg: starting: about 1 min 50 s left",
        "[0/3 points] 2 agg: 2 points, chat: about 1 min 50 s left",
    ]


def test_more_of_our_own_software_slows_the_clock_until_its_share_is_small() -> None:
    gpus = open_gpus(ModelledArgs.model_validate({"model": "m", "modelled": {"measured": MEASURED}}))
    worker = ModelledWorker(gpus, 256, 8192, 100_000)
    chat = BUILT_IN["chat"]
    first_token_ms = worker.prefill_seconds(chat.shape) * 1000
    for software in (2.0, 9.0, 30.0):
        scale = scale_for(chat, {"agg": worker}, 0.1, 200, Software(software))
        assert software / (scale * first_token_ms) <= 0.04
        assert scale == 1 or software / (scale / 2 * first_token_ms) > 0.04
    assert scale_for(chat, {"agg": worker}, 0.1, 200, Software(0.0, rest_ms=9000.0)) > 8
    assert scale_for(chat, {"agg": worker}, 0.1, 200, Software(1e6)) == 192


def test_the_clock_of_a_quick_run_is_slow_enough_for_the_slo_where_ttft_would_take_too_long() -> None:
    """29 ms are 4 % of 23 ms at 32 times slower, and then an answer of 2 s takes a minute."""
    gpus = open_gpus(ModelledArgs.model_validate({"model": "m", "modelled": {"measured": MEASURED}}))
    workers = {"agg": ModelledWorker(gpus, 256, 8192, 100_000)}
    chat, software = BUILT_IN["chat"], Software(29.0)
    assert scale_for(chat, workers, 0.1, 14, software) == 32
    assert scale_for(chat, workers, 0.1, 14, software, Slo(ttft=500)) == 1.5
    assert scale_for(chat, workers, 0.1, 14, software, Slo(ttft=200)) == 4
    # A long prompt's first token is slow enough by itself: 0.5 s.
    assert scale_for(BUILT_IN["rag"], workers, 0.1, 14, software, Slo(ttft=5000)) == 1.5


def test_large_stream_interval_allows_a_clock_as_fast_as_the_slo_permits() -> None:
    gpus = open_gpus(ModelledArgs.model_validate({"model": "m", "modelled": {"measured": MEASURED}}))
    each_token, first_and_end = (
        {"agg": ModelledWorker(gpus, 256, 8192, 100_000, stream_interval=interval)} for interval in (1, 8192)
    )
    reasoning, software = BUILT_IN["reasoning"], Software(20.0)
    assert scale_for(reasoning, each_token, 2.5, 200, software, Slo(ttft=2000)) == 12
    assert scale_for(reasoning, first_and_end, 2.5, 200, software, Slo(ttft=500)) == 1
    assert scale_for(reasoning, first_and_end, 1.0, 200, software, Slo(ttft=2000)) == 0.25
    # The engines' own work is a limit, too, and a run that concludes from TTFT itself needs more.
    assert scale_for(reasoning, first_and_end, 2.5, 200, software, Slo(ttft=2000)) == 0.5
    assert scale_for(reasoning, first_and_end, 1.0, 200, software) == 8


def test_plan_of_a_long_quick_run_recommends_a_stream_interval() -> None:
    args = argparse.Namespace(quick=True, time_scale=None)
    plan = Plan("s", (), (Workload("reasoning", "", 1024, 4096),), (), settings={"agg.yaml": "{}"})
    said = why_long(args, 5000, {}, plan)
    assert "shorter by --override-engine-args '{\"stream_interval\": 8192}'" in said
    assert why_long(args, 500, {}, plan) == ""


@pytest.mark.parametrize(
    ("time_scale", "changes"),
    [
        ("4", {}),
        (None, {"settings": {"agg.yaml": '{"stream_interval": 64}'}}),
        (None, {"workloads": (Workload("chat", "", 256, 256),)}),
        (None, {"is_modelled": False}),
    ],
    ids=["the clock is given", "clients hear of few tokens", "answers are short", "nothing is modelled"],
)
def test_a_quick_run_names_no_remedy_that_does_not_help(
    time_scale: str | None, changes: dict[str, Any]
) -> None:
    plan = Plan("s", (), (Workload("reasoning", "", 1024, 4096),), (), settings={"agg.yaml": "{}"})
    assert (
        why_long(argparse.Namespace(quick=True, time_scale=time_scale), 5000, {}, replace(plan, **changes))
        == ""
    )


def test_no_more_tokens_come_at_once_than_a_points_requests_have() -> None:
    gpus = open_gpus(ModelledArgs.model_validate({"model": "m", "modelled": {"measured": MEASURED}}))
    worker = {"agg": ModelledWorker(gpus, 256, 8192, 100_000)}
    assert scale_for(BUILT_IN["chat"], worker, 90.0, 14, Software(0.0)) == 2
    assert scale_for(BUILT_IN["chat"], worker, 90.0, 200, Software(0.0)) == 24


def test_the_band_is_of_prefill_and_decode_apart() -> None:
    assert sensitivities(0.0) == (NOMINAL,)
    others = {Sensitivity(0.5, 1), Sensitivity(1.5, 1), Sensitivity(1, 0.5), Sensitivity(1, 1.5)}
    assert set(sensitivities(0.5)) == {NOMINAL} | others


def test_a_worker_gets_the_points_factors_and_lets_requests_and_their_kv_wait(
    model: Path, configs: Path
) -> None:
    runner = prepared(model, configs, "--workers", "2", "--arms", "1P1D decode_first", "--rates", "1")
    assert isinstance(runner.targets, Deployments)
    config = runner.targets.config(("1P1D decode_first", Sensitivity(0.5, 1.0), 8.0))
    written: dict[str, Any] = yaml.safe_load(config.engine_configs["prefill"].read_text())
    own = written["modelled"]
    assert own["time_scale"] == 8.0
    assert Factors.read(Path(own["factors_file"])) == (0.5, 1.0)
    assert own["measured"] == MEASURED
    args = config.worker_args
    assert written["cache_transceiver_config"] == {"backend": "DEFAULT", "kv_transfer_timeout_ms": 3_600_000}
    for deadline in ("--prefill-timeout", "--first-decode-token-timeout", "--next-decode-token-timeout"):
        assert args[args.index(deadline) + 1] == "3600"


@pytest.mark.parametrize("arm", ["2 agg", "1P1D router", "1P1D prefill_first"])
def test_benchmark_workers_have_no_admission_bound(arm: str, model: Path, configs: Path) -> None:
    runner = prepared(model, configs, "--workers", "2", "--arms", arm, "--rates", "1")
    assert isinstance(runner.targets, Deployments)
    args = runner.targets.config((arm, NOMINAL, 1.0)).worker_args
    assert [args[args.index(f"--max-queued-{what}") + 1] for what in ("requests", "tokens")] == ["0", "0"]


def test_a_run_that_was_cut_off_goes_on_and_one_with_other_settings_does_not(
    model: Path, configs: Path
) -> None:
    flags = ("--workers", "2", "--workloads", "chat", "--rates", "1")
    before = prepared(model, configs, *flags).plan
    assert prepared(model, configs, *flags).plan == before
    with pytest.raises(ConfigError, match=r"--out: .*rates.*differ"):
        prepared(model, configs, *flags[:-1], "2")
    config = model / "config.json"
    config.write_text(config.read_text().replace("16384", "8192"))
    with pytest.raises(ConfigError, match=r"--out: .*; model differ"):
        prepared(model, configs, *flags)


def test_a_run_does_not_go_on_with_another_trace(model: Path, configs: Path) -> None:
    trace = model.parent / "trace.jsonl"
    line = '{"timestamp": 1, "input_length": 900, "output_length": 9}\n'
    trace.write_text(line * 20)
    flags = (
        "--workers",
        "2",
        "--workloads",
        "trace",
        "--trace",
        str(trace),
        "--rates",
        "1",
        "--time-scale",
        "2",
    )
    before = prepared(model, configs, *flags).plan
    moved = trace.rename(model.parent / "moved.jsonl")
    assert prepared(model, configs, *flags, "--trace", str(moved)).plan == before
    moved.write_text(line * 19 + line.replace("900", "90"))
    with pytest.raises(ConfigError, match=r"--out: .*; trace differ"):
        prepared(model, configs, *flags, "--trace", str(moved))


async def test_points_with_overlapping_requests_are_measured_again_in_a_new_deployment(
    model: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompts are the same again, and the old one has them in its caches."""
    runner = prepared(model, configs, "--quick", "--arms", "2 agg", "--workloads", "chat")
    runs: list[tuple[int, list[Point]]] = []
    started: list[str] = []

    @asynccontextmanager
    async def serving(targets: Deployments, key: Key) -> AsyncIterator[Target]:
        started.append(key[0])
        yield Target("http://there", "m")

    async def measure(runner: Runner, schedule: Schedule, *others: object) -> list[PointResult]:
        points = [stretch.point for stretch in schedule.stretches]
        runs.append((len(started), points))
        return [PointResult(point, (), 1.0) for point in points[: max(1, len(points) // 2)]]

    monkeypatch.setattr(Deployments, "serving", serving)
    monkeypatch.setattr(Runner, "measured", measure)
    monkeypatch.setattr(AIPerf, "version", lambda aiperf: "0")
    await runner.run(runner.progress())
    assert [(number, len(points)) for number, points in runs] == [(1, 11), (2, 6), (3, 3), (4, 2), (5, 1)]
    assert not runner.groups()


async def test_points_that_no_attempt_measures_end_the_run_with_their_name(
    model: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = prepared(model, configs, "--quick", "--arms", "2 agg", "--workloads", "chat", "--rates", "3")
    attempts: list[list[Point]] = []

    @asynccontextmanager
    async def serving(targets: Deployments, key: Key) -> AsyncIterator[Target]:
        yield Target("http://there", "m")

    async def measure(runner: Runner, schedule: Schedule, *others: object) -> list[PointResult]:
        attempts.append([stretch.point for stretch in schedule.stretches])
        return [PointResult(point, (), 1.0) for point in attempts[-1][:1] if len(attempts) == 2]

    monkeypatch.setattr(Deployments, "serving", serving)
    monkeypatch.setattr(Runner, "measured", measure)
    monkeypatch.setattr(AIPerf, "version", lambda aiperf: "0")
    with pytest.raises(LoadFailedError, match=r"2 agg: chat at 3 requests/s was not measured in 3 attempts"):
        await runner.run(runner.progress())
    assert len(attempts) == 5, "a point that is measured begins a new count"


async def test_a_point_with_errors_only_ends_the_run_is_not_kept_and_is_measured_by_the_next(
    model: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = prepared(model, configs, "--quick", "--arms", "2 agg", "--workloads", "chat")
    is_dead = [False, False, True]

    @asynccontextmanager
    async def serving(targets: Deployments, key: Key) -> AsyncIterator[Target]:
        yield Target("http://there", "m")

    async def measure(runner: Runner, schedule: Schedule, *others: object) -> list[PointResult]:
        def of(point: Point, dead: bool) -> PointResult:
            error = "connection refused" if dead else None
            return PointResult(point, (RequestRecord(0.0, 8, 8, 1.0, error=error),) * 14, 1.0)

        points = [stretch.point for stretch in schedule.stretches]
        return [of(*each) for each in zip(points, is_dead or [False] * len(points), strict=False)]

    monkeypatch.setattr(Deployments, "serving", serving)
    monkeypatch.setattr(Runner, "measured", measure)
    monkeypatch.setattr(AIPerf, "version", lambda aiperf: "0")
    with pytest.raises(LoadFailedError, match=r"2 agg: none of 14 requests .*\(connection refused\)"):
        await runner.run(runner.progress())
    ((_, left),) = runner.groups()
    assert len(left) == 9
    is_dead.clear()
    await runner.run(runner.progress())
    assert not runner.groups()


async def test_software_is_measured_before_the_first_run_and_kept_for_those_that_go_on(
    model: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Key] = []
    said: list[str] = []

    @asynccontextmanager
    async def serving(targets: Deployments, key: Key) -> AsyncIterator[Target]:
        started.append(key)
        yield Target("http://there", "m")

    async def calibrate(target: Target, *others: object) -> dict[str, Software]:
        return {"rag": Software(first_token_ms=90.0)}

    async def measure(runner: Runner, schedule: Schedule, *others: object) -> list[PointResult]:
        return [PointResult(stretch.point, (), 1.0) for stretch in schedule.stretches]

    monkeypatch.setattr(Deployments, "serving", serving)
    monkeypatch.setattr(starting, "calibrate", calibrate)
    monkeypatch.setattr(Runner, "measured", measure)
    monkeypatch.setattr(AIPerf, "version", lambda aiperf: "0")
    args = parsed(model, configs, "--quick")
    directory = RunDirectory(args.out)
    assert await starting.measure_all(args, AIPERF, directory, said.append) == ExitCode.DONE
    assert started[0] == ("1P1D prefill_first", NOMINAL, 1.0)
    assert directory.plan().software["rag"].first_token_ms == 90.0
    # 8192 tokens in 0.5 s, of which 90 ms are to be 4 %.
    assert {point.time_scale for point in directory.plan().points} == {6.0}
    assert "since this machine adds 90 ms to a first token" in said[-1]
    first = directory.plan().points[0]
    (directory.path / "points" / first.file_name).unlink()
    started.clear()
    assert await starting.measure_all(args, AIPERF, directory, said.append) == ExitCode.DONE
    assert started == [(first.arm, NOMINAL, 6.0)]


class TestFurtherRates:
    """Every arm is better, or worse, than the simulation that the plan's rates are from."""

    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[Point]:
        """In this order; each arm does as `self.behaviours` says."""
        points: list[Point] = []

        @asynccontextmanager
        async def serving(targets: Deployments, key: Key) -> AsyncIterator[Target]:
            yield Target("http://there", "m")

        async def measure(runner: Runner, schedule: Schedule, *others: object) -> list[PointResult]:
            new = [stretch.point for stretch in schedule.stretches]
            points.extend(new)
            return [result_of(point, self.behaviours[point.arm]) for point in new]

        monkeypatch.setattr(Deployments, "serving", serving)
        monkeypatch.setattr(Runner, "measured", measure)
        monkeypatch.setattr(AIPerf, "version", lambda aiperf: "0")
        return points

    def behave(self, agg: float, pair: float) -> None:
        self.behaviours = {
            "2 agg": Behaviour(agg),
            "1P1D prefill_first": Behaviour(pair, strategy="prefill_first"),
            "1P1D decode_first": Behaviour(pair, strategy="decode_first"),
        }

    def arguments(self, model: Path, configs: Path, *flags: str) -> argparse.Namespace:
        return parsed(model, configs, "--quick", "--time-scale", "1", "--slo", "ttft=500,tpot=30", *flags)

    def highest_planned(self, model: Path, configs: Path) -> float:
        args = self.arguments(model, configs)
        plan = runner_of_engines(args, AIPERF, RunDirectory(model.parent / "elsewhere")).plan
        return max(point.rate for point in plan.points if point.sensitivity == NOMINAL)

    async def ran(self, model: Path, configs: Path, *flags: str) -> tuple[RunDirectory, list[str]]:
        said: list[str] = []
        args = self.arguments(model, configs, *flags)
        directory = RunDirectory(args.out)
        assert await starting.measure_all(args, AIPERF, directory, said.append) == ExitCode.DONE
        return directory, said

    async def test_a_run_goes_on_with_higher_rates_until_an_arm_that_could_take_more_is_decided(
        self, model: Path, configs: Path, measured: list[Point]
    ) -> None:
        highest = self.highest_planned(model, configs)
        self.behave(agg=1.8 * highest, pair=1.1 * highest)
        directory, said = await self.ran(model, configs)
        plan = directory.plan()
        assert plan.further == tuple(measured[len(plan.points) :])
        assert any("the rates so far decide nothing: " in line for line in said)
        for arm in self.behaviours:
            own = [point for point in plan.further if point.arm == arm and point.sensitivity == NOMINAL]
            assert all(highest < point.rate <= 2.5 * highest for point in own)
            assert all(point.requests and point.drain_s for point in own)
        (sweep,) = sweeps_of(plan, directory.results())
        assert judge(sweep, goodput(Slo(ttft=500, tpot=30))).winner == "2 agg"

    async def test_an_arm_that_a_lower_rate_has_exhausted_is_not_asked_for_more(
        self, model: Path, configs: Path, measured: list[Point]
    ) -> None:
        highest = self.highest_planned(model, configs)
        self.behave(agg=0.4 * highest, pair=1.3 * highest)
        directory, _ = await self.ran(model, configs)
        further = {point.arm for point in directory.plan().further if point.sensitivity == NOMINAL}
        assert further == {"1P1D prefill_first", "1P1D decode_first"}

    async def test_a_run_that_was_cut_off_among_its_further_rates_goes_on_with_these(
        self, model: Path, configs: Path, measured: list[Point]
    ) -> None:
        highest = self.highest_planned(model, configs)
        self.behave(agg=1.8 * highest, pair=1.1 * highest)
        directory, _ = await self.ran(model, configs)
        plan = directory.plan()
        lost = plan.further[0]
        (directory.path / "points" / lost.file_name).unlink()
        measured.clear()
        again, _ = await self.ran(model, configs)
        assert measured == [lost]
        assert again.plan() == plan

    async def test_a_run_with_the_users_own_rates_has_these_only(
        self, model: Path, configs: Path, measured: list[Point]
    ) -> None:
        self.behave(agg=9.0, pair=8.0)
        directory, _ = await self.ran(model, configs, "--rates", "1,2")
        assert {point.rate for point in measured} == {1.0, 2.0}
        assert not directory.plan().further

    async def test_rates_that_are_ever_too_low_are_not_raised_for_ever(
        self, model: Path, configs: Path, measured: list[Point]
    ) -> None:
        self.behave(agg=1e6, pair=1e6)
        directory, _ = await self.ran(model, configs)
        planned = self.highest_planned(model, configs)
        further = sorted({point.rate for point in directory.plan().further})
        assert further == [pytest.approx(1.5 * planned), pytest.approx(2.25 * planned)]


def test_real_deployments_are_arms_by_their_names(model: Path, configs: Path) -> None:
    urls = ("--url", "2 agg=http://a:1", "--url", "1P1D decode_first length=http://b:2")
    runner = prepared(model, configs, *urls, "--rates", "1,2", "--workloads", "chat")
    assert [arm.name for arm in runner.plan.arms] == ["2 agg", "1P1D decode_first length"]
    assert not runner.plan.is_modelled
    assert {point.time_scale for point in runner.plan.points} == {1.0}
    assert {arm.gpus for arm in runner.plan.arms} == {2}


def test_workers_of_real_deployments_have_the_gpus_that_the_flag_says(model: Path, configs: Path) -> None:
    url = ("--url", "1P1D router=http://a:1", "--rates", "1", "--workloads", "chat")
    runner = prepared(model, configs, *url, "--gpus-per-worker", "4")
    assert [arm.gpus for arm in runner.plan.arms] == [8]
    assert runner.plan.gpus_per_worker == 4
    with pytest.raises(ConfigError, match="gpus_per_worker"):
        prepared(model, configs, *url)


def test_engine_arguments_are_overridden_for_all_roles(model: Path, configs: Path) -> None:
    override = {"tensor_parallel_size": 2, "modelled": {"link_latency_us": 7.0}}
    runner = prepared(model, configs, "--rates", "1", "--override-engine-args", json.dumps(override))
    assert {arm.gpus for arm in runner.plan.arms} == {4, 8}
    assert isinstance(runner.targets, Deployments)
    for given in runner.targets.engines.arguments.values():
        assert given["tensor_parallel_size"] == 2
        assert given["modelled"] == {"measured": MEASURED, "link_latency_us": 7.0}
    with pytest.raises(ConfigError, match="--override-engine-args is not JSON"):
        prepared(model, configs, "--override-engine-args", "{")


def test_missing_step_time_tables_are_refused_with_the_install_command(
    model: Path, configs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in configs.iterdir():
        file.write_text("max_seq_len: 16384\n")
    monkeypatch.setattr("trtllm_disagg.engines.modelled.build.PACKAGE", "package_that_is_not_there")
    with pytest.raises(
        ConfigError, match=r"step times are not installed: pip install 'trtllm-disagg\[modelled\]'"
    ):
        prepared(model, configs)


def test_real_engines_count_the_gpus_of_every_worker(model: Path, configs: Path) -> None:
    for file in configs.iterdir():
        file.write_text("tensor_parallel_size: 2\npipeline_parallel_size: 2\n")
    runner = prepared(model, configs, "--engine", "tensorrt_llm", "--rates", "1", "--workers", "2")
    assert {arm.gpus for arm in runner.plan.arms} == {8}


@pytest.mark.parametrize(
    ("content", "said"),
    [("a: [", "agg.yaml is not YAML"), ("[1]", "agg.yaml: expected keys"), ("a: 1\na: 2", "agg.yaml.*a")],
)
def test_engine_configs_that_cannot_be_read_are_named(
    model: Path, configs: Path, content: str, said: str
) -> None:
    (configs / "agg.yaml").write_text(content)
    with pytest.raises(ConfigError, match=said):
        prepared(model, configs)


def test_quick_run_measures_once_unless_repetitions_are_given(model: Path, configs: Path) -> None:
    assert parsed(model, configs, "--quick").repetitions == 1
    assert parsed(model, configs).repetitions == 2
    runner = prepared(model, configs, "--quick", "--repetitions", "3")
    assert {point.repetition for point in runner.plan.points} == {0, 1, 2}


@pytest.mark.parametrize(
    "config", [{"text_config": {"vocab_size": 99}}, {"vocab_size": 99, "text_config": {"hidden_size": 8}}]
)
def test_vocab_size_is_read_from_the_text_config_or_beside_it(model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert vocab_size(model) == 99


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--workers", "1"), "--workers: 1"),
        (("--workers", "two"), "--workers: 'two'"),
        (("--rates", "0"), "--rates: '0'"),
        (("--rates", "nan"), "--rates: 'nan'"),
        (("--rates", "1e300"), "--rates: '1e300'.*from 0.001 to 100000"),
        (("--rates", "1,1.0"), "--rates: '1,1.0'"),
        (("--workers", "2,2"), "--workers: '2,2'"),
        (("--override-engine-args", '{"modelled": {"prefill_factor": 0}}'), "modelled.prefill_factor: 0"),
        (
            ("--override-engine-args", '{"max_seq_len": 1024}', "--workloads", "rag"),
            "--workloads: 'rag'.*at most 1024",
        ),
        (("--band", "1"), "--band: 1.0"),
        (("--time-scale", "0.05"), "--time-scale: 0.05"),
        (("--workloads", "chats"), "--workloads: 'chats'"),
        (("--workloads", "trace"), "--workloads: 'trace'"),
        (("--arms", "agg"), "--arms: 'agg'"),
        (("--url", "2 agg=http://a"), "--rates: None"),
        (("--url", "agg=http://a", "--rates", "1"), "--url: 'agg'"),
        (("--url", "2 agg=a", "--rates", "1"), "--url: '2 agg=a'"),
        (("--url", "2 agg=http://a", "--url", "2 agg=http://b", "--rates", "1"), "--url: .*each arm once"),
        (("--engine", "tensorrt_llm", "--rates", "1", "--time-scale", "2"), "--time-scale: 2.0"),
    ],
)
def test_invalid_bench_strategies_value_is_refused_by_name(
    model: Path, configs: Path, flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prepared(model, configs, *flags)


def test_engine_configs_of_a_role_that_is_missing_or_has_other_gpus_are_refused(
    model: Path, configs: Path
) -> None:
    decode = configs / "decode.yaml"
    decode.write_text(decode.read_text() + "tensor_parallel_size: 2\n")
    with pytest.raises(ConfigError, match="one tensor_parallel_size x pipeline_parallel_size x context"):
        prepared(model, configs)
    decode.unlink()
    with pytest.raises(ConfigError, match=r"decode\.yaml"):
        prepared(model, configs)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"vocab_size": "many"}'])
def test_model_without_vocab_size_is_refused(model: Path, configs: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--model: .*vocab_size"):
        prepared(model, configs, "--workers", "2", "--workloads", "chat")
