"""Makes the page which-strategy of the reference, and its pictures, of runs of `bench strategies`.

    python -m tools.which_strategy RUN_DIRECTORY ... [--slo ttft=500,tpot=30]
    python -m tools.which_strategy --measure DIR --model .cache/demo-model [--minutes 50]

Every number and every sentence about an arm comes from the runs; a page of no run cannot be made. With --measure the
runs are made first (tools/which_strategy_runs.py), those that are missing in DIR or were cut off.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.which_strategy_runs import RUNS, add_arguments, measure
from trtllm_disagg.bench.strategies.charts import charts_of
from trtllm_disagg.bench.strategies.records import RunDirectory
from trtllm_disagg.bench.strategies.report import Report, WorkloadReport, report_of
from trtllm_disagg.bench.strategies.slo import DEFAULT_SLO, LABELS, Slo
from trtllm_disagg.strategies import STRATEGIES

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NAME = "which-strategy"
#: Of each workload, the pictures that are shown; the whole report has more.
_SHOWN = ("goodput", "pareto", "parts")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN_DIRECTORY")
    parser.add_argument("--measure", type=Path, metavar="DIR", help="of the runs, a directory each")
    add_arguments(parser)
    parser.add_argument(
        "--slo", type=Slo.parse, help="of all runs (default: as tools/which_strategy_runs.py has it)"
    )
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options)
        if options.dry_run:
            return
        options.runs += sorted(plan.parent for plan in options.measure.glob("*/plan.json"))
    listed = {run.name: Slo.parse(run.pair.slo) for run in RUNS}
    reports = [
        report_of(RunDirectory(path), options.slo or listed.get(path.resolve().name, DEFAULT_SLO))
        for path in options.runs
        if _has_points(path)
    ]
    if not reports:
        parser.error("no run with a measured point")
    pictures = options.out / NAME
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()
    page = "\n".join(_page(reports, pictures))
    (options.out / f"{NAME}.md").write_text(page + "\n", encoding="utf-8")
    link_from(options.out / "index.md")
    print(options.out / f"{NAME}.md")


def link_from(index: Path) -> None:
    """The folder's list of pages has it beside the other measurements; a folder without one needs none."""
    if not index.is_file():
        return
    text = index.read_text(encoding="utf-8")
    if f"({NAME}.md)" not in text:
        line = f"| [which strategy]({NAME}.md) | by model, GPU and traffic; made from runs of `bench strategies` |\n"
        index.write_text(text.replace("| [licences]", f"{line}| [licences]"), encoding="utf-8")


def _has_points(run: Path) -> bool:
    return any((run / "points").glob("*.json"))


def _page(reports: Sequence[Report], pictures: Path) -> Iterator[str]:
    runs = sum(len(report.results) for report in reports)
    yield "<!-- Made by tools/which_strategy.py; do not edit. -->"
    yield "# Which strategy?\n"
    made_of = f"{_count(runs, 'measured point')} of {_count(len(reports), 'run')}"
    yield f"What `trtllm-disagg bench strategies` said in {made_of}:"
    yield "the arm that answers most requests a second in time, on the same number of GPUs."
    if any(report.plan.is_modelled for report in reports):
        yield "The GPUs are modelled ([how](../how-to/simulate-gpus.md)): these lines compare orders, and say nothing"
        yield "absolute about a GPU."
    yield "How a conclusion is reached, and when it is refused: [reports](../how-to/choose-by-measuring.md)."
    yield ""
    yield "| served | traffic | in time | run | because, or why it is not decided |"
    yield "|---|---|---|---|---|"
    for report in reports:
        for workload in report.workloads:
            told = (report.plan.subject, workload.sweep.name, str(report.slo), _run(workload), _why(workload))
            yield f"| {' | '.join(told)} |"
    yield "\n## Where disaggregation loses\n"
    yield from _losses(reports)
    subject = ""
    for number, report in enumerate(reports, 1):
        if report.plan.subject != subject:
            subject = report.plan.subject
            yield f"\n## {subject}\n"
        yield from _run_section(report, number, pictures)


def _run(workload: WorkloadReport) -> str:
    winner = workload.advice.verdict.winner
    return f"**{winner}**" if winner else "not decided"


def _why(workload: WorkloadReport) -> str:
    return workload.advice.because if workload.advice.verdict.winner else workload.advice.verdict.why_not


def _losses(reports: Sequence[Report]) -> Iterator[str]:
    """By any measure: an arm with one kind of worker is best, and that is decided."""
    lost = [
        f"- {report.plan.subject}, {workload.sweep.name}: {verdict.winner} is best by {verdict.measure.label}."
        for report in reports
        for workload in report.workloads
        for verdict in workload.verdicts
        if verdict.winner and not _is_disaggregated(workload, verdict.winner)
    ]
    yield from lost or ["In none of these runs is that decided, by any of the measures."]


def _is_disaggregated(workload: WorkloadReport, arm: str) -> bool:
    (strategy,) = (each.strategy for each in workload.sweep.arms if each.name == arm)
    return STRATEGIES[strategy].is_disaggregated


def _run_section(report: Report, number: int, pictures: Path) -> Iterator[str]:
    yield f"    {report.plan.command}\n"
    most = ", ".join(f"{share:.1%} of {LABELS[name]}" for name, share in report.most_software.items())
    measured = "once" if report.repetitions == 1 else f"up to {report.repetitions} times"
    yield f"{_count(len(report.results), 'point')}, each measured {measured}, {' / '.join(report.machines)}."
    if most:
        yield f"Our own software took at most {most} ([what that bars](../decisions/0028-software-in-a-conclusion.md))."
    for workload in report.workloads:
        yield f"\n### {workload.sweep.name}\n"
        yield f"{workload.advice.paragraph}\n"
        for verdict in workload.others:
            told = f"{verdict.winner} is best" if verdict.winner else f"not decided ({verdict.why_not})"
            yield f"- {verdict.measure.label}: {told}."
        yield ""
        for chart in charts_of(workload.sweep, report.slo):
            if chart.name.endswith(_SHOWN):
                file = pictures / f"{number}-{chart.name}.png"
                chart.render(file)
                yield f"![{chart.title}. {chart.caption}]({NAME}/{file.name})\n"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


if __name__ == "__main__":
    main()
