"""`bench engine`: what it asks for, what it makes of what it measured, and the command as a whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trtllm_disagg import cli
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import CpuFeatures
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.engine import costs, peer_checkpoints, speed
from trtllm_disagg.tools.bench.engine.contestants import CONTESTANTS, EMBEDDED, PEERS
from trtllm_disagg.tools.bench.engine.costs import Growth, Overheads
from trtllm_disagg.tools.bench.engine.measurement_plan import QUICK, Case, MeasurementPlan
from trtllm_disagg.tools.bench.engine.speed import LLAMA_CPP, PREFILL, Speeds, decode_of
from trtllm_disagg.tools.bench.figures import Figure, Rounds, Section, draw
from trtllm_disagg.tools.bench.models import SIZES
from trtllm_disagg.tools.bench.report import (
    NOTHING_TO_JUDGE,
    TARGETS,
    TOO_SHORT,
    figures_of,
    judged,
    print_report,
    wide_console,
)

# -- models, plans, targets


def case_of(size: str) -> Case:
    return Case(MeasurementPlan(), SIZES[size], "float32", Path())


@pytest.mark.parametrize(("name", "parameters"), [("1M", 0.9e6), ("30M", 29.4e6), ("450M", 443e6)])
def test_sizes_have_their_parameters(name: str, parameters: float) -> None:
    size = SIZES[name]
    norms = (2 * size.settings["num_hidden_layers"] + 1) * size.settings["hidden_size"]
    assert size.parameters == pytest.approx(parameters, rel=0.02)
    assert size.parameters + norms == _parameters_of_transformers(name)


def _parameters_of_transformers(name: str) -> int:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**SIZES[name].settings)).parameters())


def test_the_first_prompts_are_the_same_for_every_batch() -> None:
    case = case_of("1M")
    few, many = (case.prompts(count, 10, "decode") for count in (2, 5))
    assert many[:2] == few
    assert few != case.prompts(2, 10, "prefill 0")
    assert all(len(set(map(tuple, prompts))) == len(prompts) for prompts in (few, many))


def test_options_replace_only_what_is_given() -> None:
    plan = QUICK.with_options(sizes=["30M"], dtypes=None, rounds=7, threads=None)
    assert (plan.sizes, plan.rounds, plan.dtypes, plan.batches) == (("30M",), 7, QUICK.dtypes, QUICK.batches)


@pytest.mark.parametrize(
    ("figure", "value", "target", "ok"),
    [
        ("30M float32 1t prefill embedded / llama.cpp", 1.19, ">= 1.2", False),
        ("450M bfloat16 2t prefill embedded / llama.cpp", 3.0, ">= 3", True),
        ("30M bfloat16 1t decode b1 embedded / best peer", 0.99, ">= 1", False),
        ("30M bfloat16 1t decode b8 embedded / best peer", 1.5, ">= 1.5", True),
        ("450M float32 2t decode b32 embedded / best peer", 1.89, ">= 1.9", False),
        ("450M float32 2t prefill share of the matrix product's rate", 75.0, ">= 75", True),
        ("30M float32 2t prefill share of the matrix product's rate", 1.0, None, None),
        ("450M bfloat16 1t decode b1 share of the read bandwidth", 69.0, ">= 70", False),
        ("30M bfloat16 scheduler, sampling and IPC, share of a step at batch 32", 5.0, "<= 5", True),
        ("added to TTFT by the LLM API", 0.31, "<= 0.3", False),
        ("30M float32 worker CPU per token", 15.0, "<= 15", True),
        ("allocation, largest pool / smallest", 3.1, "<= 3", False),
        ("450M bfloat16 resident / (1.25 x weights + KV pool + 400 MB)", 1.01, "<= 1", False),
        ("1M float32 1t decode b1 embedded / best peer", 0.1, None, None),
        ("30M float32 1t prefill embedded", 1.0, None, None),
    ],
)
def test_a_figure_is_judged_by_the_target_of_its_name(
    figure: str, value: float, target: str | None, ok: bool | None
) -> None:
    found = judged(Figure(figure, value, "?"), CpuFeatures("avx512", has_bfloat16=True, has_amx=True))
    assert (found.value, found.target, found.ok) == (value, target, ok)


@pytest.mark.parametrize(
    ("figure", "cpu", "target"),
    [
        ("30M bfloat16 1t prefill embedded / llama.cpp", CpuFeatures("avx512", has_bfloat16=True), ">= 1.2"),
        ("30M bfloat16 1t prefill embedded / llama.cpp", CpuFeatures("avx512"), None),
        ("30M bfloat16 1t decode b32 embedded / best peer", CpuFeatures("avx2"), None),
        ("450M bfloat16 1t decode b1 share of the read bandwidth", CpuFeatures("avx2"), None),
        ("30M float32 1t prefill embedded / llama.cpp", CpuFeatures("avx2"), ">= 1"),
        ("30M float32 1t decode b32 embedded / best peer", CpuFeatures("avx2"), ">= 1.5"),
        ("30M float32 1t decode b32 embedded / best peer", CpuFeatures("torch"), None),
        ("added to TTFT by the LLM API", CpuFeatures("torch"), "<= 0.3"),
    ],
)
def test_hardware_that_is_not_there_is_no_missed_target(
    figure: str, cpu: CpuFeatures, target: str | None
) -> None:
    assert judged(Figure(figure, 0.1, "?"), cpu).target == target


# -- what comes out


def speeds_of(**rates: Sequence[float]) -> Speeds:
    return Speeds(
        case_of("450M"),
        rates=Rounds(
            {
                name: {
                    test: [factor * value for value in values]
                    for test, factor in ((PREFILL, 10.0), (decode_of(1), 1.0), (decode_of(8), 4.0))
                }
                for name, values in rates.items()
            }
        ),
        read=[20.0, 10.0, 20.0],
        multiply=[100.0, 50.0, 100.0],
        waited=0.04,
        agreeing={"transformers": (3, 4)},
    )


def test_ratios_are_taken_in_pairs_with_the_best_peer() -> None:
    speeds = speeds_of(embedded=[10, 5, 10], **{LLAMA_CPP: [8, 4, 8]}, ctranslate2=[10, 4, 10])
    assert speeds.best_peer(decode_of(1)) == "ctranslate2"
    assert speeds.rates.ratio(decode_of(1), EMBEDDED, "ctranslate2").values == (1.0, 1.25, 1.0)
    figures = {figure.figure: figure for figure in figures_of([speed.section_of(speeds)])}
    name = "450M float32 1t"
    assert figures[f"{name} prefill embedded / llama.cpp"].value == 1.25
    assert figures[f"{name} prefill embedded / llama.cpp"].ok is True
    assert figures[f"{name} decode b8 embedded / best peer"].ok is False
    assert figures[f"{name} decode b1 ctranslate2"].value == 10.0
    assert figures[f"{name} greedy answers equal, transformers"].value == 75.0
    # 410.1M parameters of 4 bytes, ten times a second, of 20 GB/s; twice 377.5M, a hundred times, of 100 GFLOP/s.
    size = SIZES["450M"]
    share = 100 * size.streamed_parameters * 4 * 10 / 20e9
    assert figures[f"{name} decode b1 share of the read bandwidth"].value == pytest.approx(share)
    product = 100 * 2 * size.layer_parameters * 100 / 100e9
    assert figures[f"{name} prefill share of the matrix product's rate"].value == pytest.approx(product)


def test_a_crowded_machine_gives_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = speeds_of(embedded=[10, 5, 10], **{LLAMA_CPP: [8, 4, 8]})
    assert any(figure.target for figure in figures_of([speed.section_of(speeds)]))
    speeds.waited = 0.06
    assert not any(figure.target for figure in figures_of([speed.section_of(speeds)]))
    print_report(wide_console(), [speed.section_of(speeds)])
    assert "No verdict: other processes needed the cores as well." in capsys.readouterr().out


def test_without_peers_there_are_no_ratios() -> None:
    figures = [figure.figure for figure in figures_of([speed.section_of(speeds_of(embedded=[10, 5, 10]))])]
    assert "450M float32 1t decode b8 embedded" in figures
    assert not [figure for figure in figures if "/" in figure]


def test_curve_has_its_growth_per_doubling() -> None:
    curve = Growth({8: 1.0, 16: 1.5, 64: 6.0})
    assert curve.ends == 6.0
    assert curve.per_doubling == 2.0


def scaling_of(growth: float) -> Section:
    curves = ("batch", "context", "pool of blocks", "lookup", "allocation")
    return costs.scaling_section("30M float32", dict.fromkeys(curves, Growth({1: 1.0, 2: growth})))


def test_costs_that_grow_too_fast_miss_their_targets() -> None:
    assert all(figure.ok for figure in figures_of([scaling_of(1.1)]) if figure.target)
    missed = [figure.figure for figure in figures_of([scaling_of(5.0)]) if figure.ok is False]
    assert len(missed) == 5


def overheads_of(**more: float) -> Overheads:
    values = {"step": 9e-3, "forward": 8e-3, "ipc": 1e-3, "cpu_per_token": 1e-5, "resident": 5e8, "pool": 1e8}
    return Overheads(case_of("30M"), **(values | more))


def test_overheads_have_share_weights_and_allowed_memory() -> None:
    assert overheads_of().share == pytest.approx(20.0)
    assert overheads_of().weights == 4 * SIZES["30M"].parameters
    assert overheads_of().allowed == 1.25 * 4 * SIZES["30M"].parameters + 1e8 + 4e8


def test_the_report_names_what_is_absent_and_what_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = speeds_of(embedded=[10, 5, 10], **{LLAMA_CPP: [20, 10, 20]})
    speeds.absent["ctranslate2"] = "not installed; pip install ctranslate2"
    sections = [
        speed.section_of(speeds),
        costs.overheads_section(overheads_of()),
        costs.added_ttft_section(2e-4),
        scaling_of(1.0),
    ]
    print_report(wide_console(), sections)
    output = capsys.readouterr().out
    assert "ctranslate2: not installed; pip install ctranslate2." in output
    assert ["450M", "float32", "1t", "greedy", "answers", "equal,", "transformers", "75", "%"] in map(
        str.split, output.splitlines()
    )
    assert "450M float32 1t, tokens a second" in output
    assert "missed" in output
    judged_figures = [figure for figure in figures_of(sections) if figure.ok is not None]
    met = [figure for figure in judged_figures if figure.ok]
    assert f"{len(met)} of {len(judged_figures)} targets are met." in output


def test_a_quick_run_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    sections = [replace(scaling_of(1.0), not_judged_because=TOO_SHORT)]
    assert figures_of(sections)
    assert not any(figure.target or figure.ok is not None for figure in figures_of(sections))
    print_report(wide_console(), sections)
    assert capsys.readouterr().out.endswith("No target is judged: the run is too short.\n")


def test_report_names_why_no_target_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(wide_console(), [speed.section_of(replace(speeds_of(embedded=[1.0] * 3), waited=0.5))])
    assert capsys.readouterr().out.endswith(f"No target is judged: {speed.CROWDED}.\n")
    print_report(wide_console(), [Section("nothing", figures=[Figure("a new figure", 1.0, "s")])])
    assert capsys.readouterr().out.endswith(f"No target is judged: {NOTHING_TO_JUDGE}.\n")


def test_engine_charts_are_drawn_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sections = [speed.section_of(speeds_of(embedded=[1.0] * 3)), scaling_of(1.0)]
    panels = [panel for section in sections for panel in section.every_panel]
    draw(panels, "bench engine", tmp_path / "charts.png")
    assert (tmp_path / "charts.png").read_bytes().startswith(b"\x89PNG")


# -- the weights of the peers


def test_gguf_puts_the_halves_of_a_rotated_pair_side_by_side() -> None:
    weight = np.arange(8)[:, None]
    assert peer_checkpoints.interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_targets_are_named_once() -> None:
    named = [(target.pattern, target.on) for target in TARGETS]
    assert len(set(named)) == len(named)
    assert not any(
        judged(Figure(f"{size} {dtype} resident", 1.0, "MB")).target
        for size, dtype in itertools.product("1", "2")
    )


# -- the command


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench-engine")


@pytest.fixture(scope="module")
def quick(cache: Path) -> tuple[dict[str, Figure], str]:
    """All of it, with the peers that are installed."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    output, errors = StringIO(), StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        assert cli.run(["bench", "engine", "--quick", "--json", "--cache-dir", str(cache)]) == 0
    figures = [Figure(**entry) for entry in json.loads(output.getvalue())]
    assert len({figure.figure for figure in figures}) == len(figures)
    return {figure.figure: figure for figure in figures}, errors.getvalue()


def test_the_command_measures_everything(quick: tuple[dict[str, Figure], str]) -> None:
    figures, _ = quick
    for name in (
        "1M float32 1t prefill embedded",
        "1M float32 1t decode b4 embedded API",
        "1M float32 1t decode b4 transformers",
        "1M float32 1t read bandwidth",
        "1M float32 1t matrix product's rate",
        "1M float32 scheduler and sampling of it",
        "1M float32 worker CPU per token",
        "1M float32 resident",
        "1M float32 step, batch 4",
        "1M float32 step, context 128",
        "lookup in a pool of 10000 blocks",
    ):
        assert figures[name].value > 0, name
    # A difference of two times: on a busy machine it may be below 0.
    assert "added to TTFT by the LLM API" in figures
    assert {figure.target for figure in figures.values()} == {None}


def test_all_installed_peers_run_the_same_weights(quick: tuple[dict[str, Figure], str], cache: Path) -> None:
    figures, _ = quick
    for peer in PEERS:
        name = f"1M float32 1t greedy answers equal, {peer}"
        if CONTESTANTS[peer].absence("float32", cache) is None:
            assert figures[name].value == 100.0, peer
        else:
            assert name not in figures


def test_a_cache_directory_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"--cache-dir: '.*file' is not allowed; .*a directory that can be made"
    ):
        cli.run(["bench", "engine", "--quick", "--cache-dir", str(tmp_path / "file")])
