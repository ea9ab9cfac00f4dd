"""The record that the page which-strategy keeps of a run: conclusions and pictures, since points are megabytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtllm_disagg.strategies import STRATEGIES
from trtllm_disagg.tools.bench.strategies.charts import Chart, charts_of
from trtllm_disagg.tools.bench.strategies.measures import LABELS, Slo
from trtllm_disagg.tools.bench.strategies.records import RunDirectory
from trtllm_disagg.tools.bench.strategies.run_report import Report, WorkloadReport, report_of
from trtllm_disagg.tools.bench.strategies.verdict import Verdict

#: The charts of each workload that the page shows; the full report has more.
_SHOWN = ("goodput", "pareto", "parts")
#: A drawing has few colours; with a palette of these its file has a third of the size.
_COLORS = 64


@dataclass(frozen=True)
class KeptVerdict:
    measure: str
    winner: str | None
    #: Empty where there is a winner.
    why_not: str
    #: The arms that may be the best; empty if it may be any arm.
    candidates: tuple[str, ...]
    #: Whether the winner, or each candidate of a tie, has separate workers for prefill and decode.
    is_disaggregated: bool
    #: Whether the candidates, or all arms, are alike.
    is_tie: bool = False


@dataclass(frozen=True)
class KeptPicture:
    file: str
    text: str


@dataclass(frozen=True)
class KeptSweep:
    """A workload on a number of GPUs."""

    workload: str
    name: str
    advice: str
    because: str
    #: The one by the SLO comes first.
    verdicts: tuple[KeptVerdict, ...]
    pictures: tuple[KeptPicture, ...]


@dataclass(frozen=True)
class KeptRun:
    subject: str
    slo: str
    command: str
    points: int
    repetitions: int
    machines: tuple[str, ...]
    #: The highest share of our own software in each time.
    software: dict[str, float]
    is_modelled: bool
    sweeps: tuple[KeptSweep, ...]


def keep(run: Path, slo: Slo, folder: Path) -> None:
    """Writes a run's record and pictures, and replaces those of the same name. Raises ConfigError for a directory
    without a measured point.
    """
    name = run.resolve().name
    report = report_of(RunDirectory(run), slo)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}.*.png"):
        old.unlink()
    kept = msgspec.json.encode(_kept(report, name, folder), order="deterministic")
    (folder / f"{name}.json").write_bytes(msgspec.json.format(kept, indent=1) + b"\n")


def kept_in(folder: Path) -> Iterator[KeptRun]:
    """All kept runs, sorted by file name."""
    for file in sorted(folder.glob("*.json")):
        yield msgspec.json.decode(file.read_bytes(), type=KeptRun)


def _kept(report: Report, name: str, folder: Path) -> KeptRun:
    return KeptRun(
        report.plan.subject,
        str(report.slo),
        _anywhere(report.plan.command),
        len(report.results),
        report.repetitions,
        tuple(report.machines),
        {LABELS[quantity]: round(share, 4) for quantity, share in report.most_software.items()},
        report.plan.is_modelled,
        tuple(_sweep(each, report.slo, name, folder) for each in report.workloads),
    )


def _anywhere(command: str) -> str:
    """`command` without the path of AIPerf on the machine of the run."""
    words = shlex.split(command)
    if "--aiperf" in words:
        at = words.index("--aiperf")
        del words[at : at + 2]
    return shlex.join(words)


def _sweep(each: WorkloadReport, slo: Slo, name: str, folder: Path) -> KeptSweep:
    charts = [chart for chart in charts_of(each.sweep, slo) if chart.name.endswith(_SHOWN)]
    return KeptSweep(
        each.sweep.workload.name,
        each.sweep.name,
        each.advice.paragraph,
        each.advice.because if each.advice.verdict.winner else each.advice.verdict.why_not,
        tuple(_verdict(verdict, each) for verdict in each.verdicts),
        tuple(_picture(chart, folder / f"{name}.{chart.name}.png") for chart in charts),
    )


def _verdict(verdict: Verdict, each: WorkloadReport) -> KeptVerdict:
    strategy = {arm.name: arm.strategy for arm in each.sweep.arms}
    candidates = (verdict.best, *(lead.other for lead in verdict.doubtful)) if verdict.beaten else ()
    best = (verdict.winner,) if verdict.winner else candidates if verdict.is_tie else ()
    return KeptVerdict(
        verdict.measure.label,
        verdict.winner,
        verdict.why_not,
        candidates,
        bool(best) and all(STRATEGIES[strategy[arm]].is_disaggregated for arm in best),
        verdict.is_tie,
    )


def _picture(chart: Chart, file: Path) -> KeptPicture:
    from PIL import Image

    chart.render(file)
    with Image.open(file) as drawn:
        small = drawn.convert("RGB").quantize(_COLORS)
    small.save(file, optimize=True)
    return KeptPicture(file.name, f"{chart.title}. {chart.caption}")
