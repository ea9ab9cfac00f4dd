"""The page about which strategy is made from runs, and says which ones."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.modelled_cores import MEASURED
from tests.unit.tools.bench.strategies.synthetic import Behaviour, saved
from tools.which_layout import Leads, write_page
from tools.which_strategy import link_from, main
from tools.which_strategy_runs import RUNS
from tools.which_strategy_trace import write_trace
from trtllm_disagg.engines.modelled.build import Gpus, open_gpus
from trtllm_disagg.engines.modelled.config import ModelledArgs
from trtllm_disagg.tools.bench.strategies import add_arguments as add_bench_arguments
from trtllm_disagg.tools.bench.strategies import simulation
from trtllm_disagg.tools.bench.strategies.layout_comparison import (
    FIRST_TOKEN_FACTORS,
    TOKEN_FACTORS,
    LayoutLead,
)
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN, trace

AGG, ORDER = "2 agg", "1P1D decode_first"


def measured(path: Path, agg: Behaviour, order: Behaviour) -> str:
    return str(saved(path, {AGG: agg, ORDER: order}).path)


def rows_of(page: Path) -> list[str]:
    return [line for line in page.read_text().splitlines() if line.startswith(("| [a model", "| chat"))]


def test_the_page_has_a_cell_a_run_by_each_measure_and_a_page_a_subject_with_reasons(tmp_path: Path) -> None:
    runs = (
        measured(tmp_path / "a", Behaviour(6, tpot=10), Behaviour(12, tpot=20, strategy="decode_first")),
        measured(tmp_path / "b", Behaviour(6), Behaviour(6, strategy="decode_first")),
    )
    main([*runs, "--out", str(tmp_path)])
    by_measure = rows_of(tmp_path / "which-strategy.md")
    assert [row.split(" | ")[2].removesuffix(" |") for row in by_measure] == [
        f"**{ORDER}**; alike",
        "**2 agg**; alike",
        "alike; alike",
        "**2 agg**; alike",
    ]
    page = (tmp_path / "which-strategy.md").read_text()
    assert "Decided in 1 of 2: separate workers are best in 1 of these" in page
    (subject,) = (tmp_path / "which-strategy").glob("*.md")
    assert f"(which-strategy/{subject.name})" in page
    won, tied = rows_of(subject)
    assert f"chat on 2 GPUs | TTFT 500 ms and TPOT 30 ms | **{ORDER}** | It answers up to" in won
    assert "| alike | " in tied
    assert "differ by less than 5%" in tied
    pictures = re.findall(r"\]\(([^)]+\.png)\)", subject.read_text())
    assert len(pictures) == 2 * 3
    assert all((subject.parent / picture).is_file() for picture in pictures)


def test_a_run_that_is_made_again_takes_the_place_of_its_old_record_and_the_others_stay(
    tmp_path: Path,
) -> None:
    better, worse = Behaviour(12), Behaviour(6, strategy="decode_first")
    for name, agg, order in (("a", better, worse), ("b", better, worse)):
        main([measured(tmp_path / name, agg, order), "--out", str(tmp_path)])
    again = tmp_path / "again" / "b"
    main([measured(again, Behaviour(6), Behaviour(12, strategy="decode_first")), "--out", str(tmp_path)])
    cells = rows_of(tmp_path / "which-strategy.md")[0].split(" | ")[2]
    assert cells == f"**2 agg**; **{ORDER}** |"


def test_the_list_of_pages_has_the_page_beside_the_other_measurements(tmp_path: Path) -> None:
    index = tmp_path / "index.md"
    index.write_text("| [benchmarks](benchmarks.md) | |\n| [licences](licences.md) | |\n")
    for _ in range(2):
        link_from(index, "which-strategy", "by model")
    assert re.findall(r"\[([a-z ]+)\]", index.read_text()) == ["benchmarks", "which strategy", "licences"]


def test_the_command_that_is_kept_names_no_place_on_the_machine_of_its_run(tmp_path: Path) -> None:
    directory = saved(tmp_path / "run", {AGG: Behaviour(6), ORDER: Behaviour(12, strategy="decode_first")})
    plan = replace(
        directory.plan(), command="trtllm-disagg bench strategies --aiperf /opt/a/aiperf --slo 'ttft=1'"
    )
    directory.save_plan(plan)
    main([str(directory.path), "--out", str(tmp_path)])
    (kept,) = (tmp_path / "which-strategy").glob("*.json")
    assert json.loads(kept.read_text())["command"] == "trtllm-disagg bench strategies --slo ttft=1"


def test_the_page_of_layouts_counts_where_separate_workers_are_clearly_better(tmp_path: Path) -> None:
    limits = [(first, token) for first in FIRST_TOKEN_FACTORS for token in TOKEN_FACTORS]
    separate, slightly, agg = LayoutLead("2P2D", 1.62), LayoutLead("1P3D", 1.05), LayoutLead("4 agg", 2.0)
    of_one: Leads = dict.fromkeys(limits, separate)
    of_one |= {(first, TOKEN_FACTORS[-1]): agg for first, _ in limits}
    of_another: Leads = dict.fromkeys(limits, slightly)
    of_another[limits[0]] = None
    write_page(
        {"rag": {"a model": ("9 ms, 1 ms", of_one), "another": ("8 ms, 1 ms", of_another)}}, 4, tmp_path
    )

    text = (tmp_path / "which-layout.md").read_text()
    (counts,) = [line for line in text.splitlines() if line.startswith("| [rag](#rag)")]
    assert counts.split(" | ")[1:] == ["3 of 6"] * 4 + ["0 of 6 |"]
    assert f"| a model: 9 ms, 1 ms | 2x |{' **2P2D 1.6x** |' * 4} 4 agg 2.0x |" in text
    assert "| another: 8 ms, 1 ms | 2x | - | alike |" in text


@pytest.fixture
def tables() -> None:
    pytest.importorskip(
        "aiconfigurator_core.sdk", reason="pip install 'trtllm-disagg[modelled]', which is 80 MB of tables"
    )


def test_a_run_of_the_list_is_a_command_that_plans_its_pair_and_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"model": "m", "modelled": {"measured": MEASURED}}
    monkeypatch.setattr(simulation, "open_gpus", lambda args: gpus_of(json.dumps(measured)))
    only = "llama-3.1-70b-fp8-h200_sxm-bursts"
    model = str(model_in(tmp_path))
    main(["--measure", str(tmp_path), "--model", model, "--dry-run", "--only", only])
    line, planned = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"llama-3\.1-70b-fp8-h200_sxm-bursts: \d+\.\d min", planned)
    argv = shlex.split(line)
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    args = parser.parse_args(argv[argv.index("strategies") + 1 :])
    assert (args.quick, args.workloads, args.requests, args.time_scale) == (True, "bursts", "auto", 3)
    override = json.loads(args.override_engine_args)
    assert override["modelled"] == {"model": "llama-3.1-70b-fp8", "system": "h200_sxm"}
    assert override["tensor_parallel_size"] == 2


def test_the_list_has_five_pairs_under_every_workload_once() -> None:
    pairs = {(run.pair.model, run.pair.system) for run in RUNS}
    assert len(pairs) == 5
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert sorted(run.name for run in RUNS if not run.tight_slo) == sorted(
        f"{model}-{system}-{workload}" for model, system in pairs for workload in (*BUILT_IN, "trace")
    )


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("workload", ["chat", "reasoning"])
def test_a_run_with_many_requests_or_long_answers_is_planned_to_end_within_two_hours(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the others `--dry-run` says it; tables take a while."""
    monkeypatch.setattr(simulation, "open_gpus", lambda args: gpus_of(args.model_dump_json()))
    options = argparse.Namespace(measure=tmp_path, model=model_in(tmp_path))
    (run,) = (run for run in RUNS if run.name == f"llama-3.1-8b-h100_sxm-{workload}")
    assert run.minutes(options) <= 120


@functools.cache
def gpus_of(arguments: str) -> Gpus:
    return open_gpus(ModelledArgs.model_validate_json(arguments))


def model_in(directory: Path) -> Path:
    (directory / "config.json").write_text('{"vocab_size": 3072, "max_position_embeddings": 16384}')
    return directory


def test_the_trace_is_always_the_same_and_its_turns_begin_with_those_before(tmp_path: Path) -> None:
    for name in "ab":
        write_trace(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    replayed = trace(tmp_path / "a", longest=16384)
    assert 0.5 < replayed.shape.cached_tokens / replayed.shape.input_tokens < 0.9
    asks = replayed.asks(2.0, 24, "seed", 3072)
    assert len(asks) == 24
    lines = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert all(len(line["hash_ids"]) == -(-line["input_length"] // 512) for line in lines)


def test_no_run_begins_without_time_for_the_longest_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0

    def takes_twenty_minutes(command: list[str], **how: object) -> subprocess.CompletedProcess[bytes]:
        nonlocal now
        now += 20 * 60
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", takes_twenty_minutes)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pytest.raises(SystemExit):  # there is no run to make the page of
        main(["--measure", str(tmp_path), "--minutes", "50", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert said.count("exit status 0 after 20.0 min") == 2
    assert "no time left for llama-3.1-70b-fp8-h200_sxm-rag" in said
