"""Makes the pages which-strategy of the reference, and their pictures, from runs of `bench strategies`.

    python -m tools.which_strategy RUN_DIRECTORY ... [--slo ttft=500,tpot=30]
    python -m tools.which_strategy --measure DIR --model .cache/demo-model [--minutes 50]

Every number and every sentence about an arm comes from the runs. Their conclusions are kept beside the pages, so that
one run can be added or repeated without the others. --measure first makes the runs (tools/which_strategy_runs.py) that
are missing in DIR or were interrupted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.which_strategy_kept import KeptRun, KeptSweep, KeptVerdict, keep, kept_in
from tools.which_strategy_runs import RUNS, add_arguments, measure
from trtllm_disagg.tools.bench.strategies.measures import DEFAULT_SLO, Slo

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NAME = "which-strategy"
#: Headings of the measures, in the order of a sweep's verdicts.
MEASURES = ("Most answers in time", "Speed for a user and work of a GPU", "First token", "Time per token")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN_DIRECTORY")
    parser.add_argument(
        "--measure", type=Path, metavar="DIR", help="directory of the runs, which have a directory each"
    )
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
    listed = {run.name: Slo.parse(run.slo) for run in RUNS}
    kept = options.out / NAME
    for path in filter(_has_points, options.runs):
        keep(path, options.slo or listed.get(path.resolve().name, DEFAULT_SLO), kept)
    runs = list(kept_in(kept))
    if not runs:
        parser.error("no run with a measured point")
    write_pages(runs, options.out)
    print(options.out / f"{NAME}.md")


def _has_points(run: Path) -> bool:
    return any((run / "points").glob("*.json"))


def write_pages(runs: Sequence[KeptRun], out: Path) -> None:
    """Writes a page of all runs and one of each subject."""
    (out / f"{NAME}.md").write_text("\n".join(_page(runs)) + "\n", encoding="utf-8")
    link_from(out / "index.md", NAME, "by model, GPU and traffic; made from runs of `bench strategies`")
    for subject in _subjects(runs):
        page = "\n".join(_subject_page(subject, [run for run in runs if run.subject == subject]))
        (out / NAME / _file(subject)).write_text(page + "\n", encoding="utf-8")


def link_from(index: Path, name: str, said: str) -> None:
    """Adds the page to the folder's index.md, if there is one and it does not have the page."""
    if not index.is_file():
        return
    text = index.read_text(encoding="utf-8")
    if f"({name}.md)" not in text:
        line = f"| [{name.replace('-', ' ')}]({name}.md) | {said} |\n"
        index.write_text(text.replace("| [licences]", f"{line}| [licences]"), encoding="utf-8")


def _page(runs: Sequence[KeptRun]) -> Iterator[str]:
    yield "# Which strategy?\n"
    yield "<!-- Made by tools/which_strategy.py; do not edit. -->\n"
    made_of = f"{_count(sum(run.points for run in runs), 'measured point')} of {_count(len(runs), 'run')}"
    yield f"What `trtllm-disagg bench strategies` said in {made_of}:"
    yield "which layout of the same number of GPUs is best, by four measures. The first one is what to run by."
    if any(run.is_modelled for run in runs):
        yield "The GPUs are modelled ([how](../how-to/simulate-gpus.md)): these lines compare orders, and say nothing"
        yield "absolute about a GPU."
    yield "How a conclusion is reached, and when it is refused: [reports](../how-to/choose-by-measuring.md)."
    yield "**Bold** is decided; with a question mark one of these is best, and which one is not decided;"
    yield "alike are layouts that differ by less than 10 %, too little for one measurement."
    yield "`2 agg` are two workers that do both, `1P1D` is a prefill and a decode worker in the order behind it."
    yield "Under which limits separate workers should be better, by simulation: [which layout](which-layout.md)."
    for place, heading in enumerate(MEASURES):
        yield f"\n## {heading}\n"
        yield from _matrix(runs, place)


def _matrix(runs: Sequence[KeptRun], place: int) -> Iterator[str]:
    """The table of one measure: a row for each subject and SLO, a column for each workload."""
    workloads = list(dict.fromkeys(sweep.workload for run in runs for sweep in run.sweeps))
    judged = [sweep.verdicts[place] for run in runs for sweep in run.sweeps]
    decided = [verdict for verdict in judged if verdict.winner or (verdict.is_tie and verdict.candidates)]
    separate = sum(verdict.is_disaggregated for verdict in decided)
    ties = ", ties of the best ones among them" if any(verdict.is_tie for verdict in decided) else ""
    yield f"Decided in {len(decided)} of {len(judged)}{ties}: separate workers are best in {separate} of these.\n"
    yield f"| served | in time | {' | '.join(workloads)} |"
    yield f"|---|---|{'---|' * len(workloads)}"
    for subject, slo in sorted({(run.subject, run.slo) for run in runs}):
        mine = [sweep for run in runs if (run.subject, run.slo) == (subject, slo) for sweep in run.sweeps]
        cells = (_cell([each for each in mine if each.workload == name], place) for name in workloads)
        yield f"| [{subject}]({NAME}/{_file(subject)}) | {slo} | {' | '.join(cells)} |"


def _cell(sweeps: Sequence[KeptSweep], place: int) -> str:
    return "; ".join(_choice(sweep.verdicts[place]) for sweep in sweeps) or "not measured"


def _choice(verdict: KeptVerdict) -> str:
    if verdict.winner:
        return f"**{verdict.winner}**"
    candidates = " or ".join(verdict.candidates)
    if verdict.is_tie:
        return f"{candidates}, alike" if candidates else "alike"
    return f"{candidates}?" if candidates else "not decided"


def _subject_page(subject: str, runs: Sequence[KeptRun]) -> Iterator[str]:
    yield f"# {subject}\n"
    yield "<!-- Made by tools/which_strategy.py; do not edit. -->\n"
    yield f"Of [which strategy?](../{NAME}.md)\n"
    yield "| traffic | in time | run | because, or why it is not decided |"
    yield "|---|---|---|---|"
    for run in runs:
        for sweep in run.sweeps:
            yield f"| {sweep.name} | {run.slo} | {_choice(sweep.verdicts[0])} | {sweep.because} |"
    for run in runs:
        yield from _run_section(run)


def _run_section(run: KeptRun) -> Iterator[str]:
    for sweep in run.sweeps:
        yield f"\n## {sweep.name}\n"
        yield from _sweep_section(sweep)
    yield f"    {run.command}\n"
    measured = "once" if run.repetitions == 1 else f"up to {run.repetitions} times"
    yield f"{_count(run.points, 'point')}, each measured {measured}, {' / '.join(run.machines)}."
    if run.software:
        most = ", ".join(f"{share:.1%} of {label}" for label, share in run.software.items())
        barred = "[what that bars](../../decisions/0028-software-in-a-conclusion.md)"
        yield f"Our own software took at most {most} ({barred})."


def _sweep_section(sweep: KeptSweep) -> Iterator[str]:
    yield f"{sweep.advice}\n"
    for verdict in sweep.verdicts[1:]:
        told = f"{verdict.winner} is best" if verdict.winner else f"not decided ({verdict.why_not})"
        yield f"- {verdict.measure}: {told}."
    yield ""
    for picture in sweep.pictures:
        yield f"![{picture.text}]({picture.file})\n"


def _subjects(runs: Sequence[KeptRun]) -> list[str]:
    return sorted({run.subject for run in runs})


def _file(subject: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", subject.lower()) + ".md"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


if __name__ == "__main__":
    main()
