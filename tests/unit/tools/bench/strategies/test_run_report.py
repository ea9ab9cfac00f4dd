"""The report of a run: what its page says first, that it needs nothing else, and that its files agree."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.tools.bench.strategies.synthetic import (
    BAND,
    Behaviour,
    plan_of,
    results_of,
    saved,
    with_software,
)
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.charts import charts_of
from trtllm_disagg.tools.bench.strategies.measures import Slo
from trtllm_disagg.tools.bench.strategies.records import NOMINAL, RunDirectory, Sensitivity
from trtllm_disagg.tools.bench.strategies.run_report import _page, arm_rows, report_of, write_report

AGG, ORDER = "2 agg", "1P1D decode_first"
BEHAVIOURS = {AGG: Behaviour(6, noise=0.02), ORDER: Behaviour(12, noise=0.02, strategy="decode_first")}
PLOTS = {"goodput", "pareto", "parts", "hit-rate", "gaps"} | {
    f"{time}-p{percent}" for time in ("ttft", "tpot") for percent in (50, 90, 99)
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run directory with its report: drawing takes seconds, so once for all tests."""
    run = saved(tmp_path_factory.mktemp("run"), BEHAVIOURS)
    write_report(run)
    return run


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> str:
    return (run.path / "report.html").read_text(encoding="utf-8")


class _Text(HTMLParser):
    """What a reader sees, and everything that a tag refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.references += [
            named[name] or "" for name in named if name.split(":")[-1] in ("href", "src", "srcset")
        ]
        self.references += [url for value in named.values() for url in _urls(value or "")]
        self.ids += [named["id"] or ""] if "id" in named else []


def _urls(style: str) -> Iterator[str]:
    yield from re.findall(r"url\(([^)]*)\)", style)


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    read = _Text()
    read.feed(page)
    assert read.references
    assert all(reference.startswith("#") for reference in read.references)
    assert "@import" not in page
    assert "<script" not in page
    # Names of XML's languages are no addresses, and nothing fetches them.
    assert not re.findall(r'(?<!xmlns=")(?<!xmlns:xlink=")https?://', page)


def test_every_reference_in_the_page_has_its_one_target(page: str) -> None:
    read = _Text()
    read.feed(page)
    assert {reference[1:] for reference in read.references} <= set(read.ids)
    assert len(read.ids) == len(set(read.ids))


def test_the_page_answers_before_its_first_plot(page: str) -> None:
    read = _Text()
    read.feed(page[: page.index("<svg")])
    top = " ".join(" ".join(read.words).split())
    assert "Run decode_first with 1 prefill worker and 1 decode worker, decider always" in top
    assert "What changes it:" in top
    assert top.index("chat") < top.index(ORDER) < top.index("By other measures")
    assert "Pareto" not in top[: top.index("All arms, medians")]


def test_plots_take_their_colours_from_the_page(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == len(PLOTS)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "var(--ink)" in drawing
        assert "#ffffff" not in drawing


def test_every_plot_is_a_png_too(run: RunDirectory) -> None:
    files = list((run.path / "plots").iterdir())
    assert {file.stem for file in files} == {f"chat-on-2-gpus-{name}" for name in PLOTS}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_table_of_points_has_a_line_each(run: RunDirectory) -> None:
    with (run.path / "points.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(plan_of(BEHAVIOURS).points)
    nominal = [row for row in rows if row["prefill_factor"] == row["decode_factor"] == "1.0"]
    first = next(row for row in nominal if (row["arm"], row["rate"]) == (AGG, "1.0"))
    assert (float(first["goodput_requests_s"]), first["tpot_p99_ms"], first["errors"]) == (1, "20.0", "0")


def test_the_json_has_verdicts_commands_and_versions(run: RunDirectory) -> None:
    report = json.loads((run.path / "report.json").read_text())
    verdict = report["workloads"][0]["verdicts"][0]
    assert verdict["winner"] == ORDER
    assert len(verdict["scores"]) == len(BEHAVIOURS) * len(BAND)
    assert report["runs"][0]["commands"]["frontend"] == "frontend of 2 agg"
    assert report["runs"][0]["versions"] == {"trtllm-disagg": "0.2.0"}
    assert report["slo"] == {"ttft": 500, "tpot": 30}


def test_an_arm_whose_tokens_take_no_time_is_drawn_without_a_place(tmp_path: Path) -> None:
    behaviours = BEHAVIOURS | {AGG: Behaviour(6, tpot=0.0)}
    (sweep,) = (each.sweep for each in report_of(saved(tmp_path, behaviours)).workloads)
    (chart,) = (chart for chart in charts_of(sweep, Slo(ttft=500)) if chart.name.endswith("pareto"))
    drawing = chart.render(tmp_path / "pareto.png")
    assert ORDER in drawing
    assert AGG not in drawing


def test_report_of_an_unfinished_run_counts_missing_points(tmp_path: Path) -> None:
    run, plan = saved(tmp_path, BEHAVIOURS), plan_of(BEHAVIOURS)
    (tmp_path / "points" / plan.points[-1].file_name).unlink()
    assert report_of(run).workloads[0].missing == 1


def test_the_advice_follows_the_slo(run: RunDirectory) -> None:
    assert report_of(run, Slo(ttft=500)).advice().startswith("chat on 2 GPUs: run decode_first")
    assert "no arm keeps it" in report_of(run, Slo(ttft=1)).advice()


def test_undecided_report_names_no_best_arm_and_its_reason_once(
    tmp_path: Path,
) -> None:
    run = saved(tmp_path, BEHAVIOURS)
    faster = next(variant for variant in BAND if variant.prefill_factor < 1)
    for result in [result for result in run.results() if result.point.sensitivity == faster]:
        run.save(with_software(result, 0.2))
    report = report_of(run)
    why = report.workloads[0].advice.verdict.why_not
    assert why == (
        "the sensitivity band lacks prefill faster (from 1 requests/s on with prefill steps x0.5: our own software "
        "took 20% of latency (most: 5%) in 2 agg)"
    )
    _, rows = arm_rows(report.workloads[0], report.slo)
    assert [row.cells[1] for row in rows] == ["-", "-"]
    read = _Text()
    read.feed(_page(report, [[]]))
    # At the top, and where it is said of this traffic; not as a rate that is left out too.
    assert " ".join(" ".join(read.words).split()).count("our own software took 20% of latency") == 2


def test_a_run_without_a_point_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        report_of(run)
    run.save_plan(plan_of(BEHAVIOURS))
    with pytest.raises(ConfigError, match="one in which a point has been measured"):
        report_of(run)


def test_report_page_shows_the_measured_band_and_none_of_a_real_deployment(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    behaviours = {AGG: Behaviour(6), ORDER: Behaviour(12, strategy="decode_first")}
    narrow = plan_of(
        behaviours,
        rates=(2.0, 8.0),
        band=(NOMINAL, *(Sensitivity(f) for f in (0.8, 1.2)), Sensitivity(1, 0.8)),
    )
    for plan, said in (
        (narrow, "of prefill, or of decode, that are 20 % shorter or longer do not turn it round"),
        (replace(narrow, is_modelled=False), "what repetitions differ by; and it rests on no rate"),
    ):
        run.save_plan(plan)
        for result in results_of(plan, behaviours):
            run.save(result)
        report = report_of(run)
        assert said in " ".join(_page(report, [[] for _ in report.workloads]).split())
