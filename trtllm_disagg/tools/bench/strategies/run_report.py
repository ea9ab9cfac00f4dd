"""Writes the report of a run directory: report.html, which needs no other file, plots/, points.csv and report.json."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.advice import Advice, advise, described
from trtllm_disagg.tools.bench.strategies.charts import charts_of
from trtllm_disagg.tools.bench.strategies.measures import DEFAULT_SLO, PARTS, PERCENTILES, QUANTITIES, Slo
from trtllm_disagg.tools.bench.strategies.records import NOMINAL, Plan, PointResult, RunDirectory, write_whole
from trtllm_disagg.tools.bench.strategies.sweep import Sweep, sweeps_of
from trtllm_disagg.tools.bench.strategies.verdict import (
    Lead,
    Verdict,
    judge,
    latency_at,
    number,
    pareto_area,
    past_at_every_rate,
    spread,
)

_TEMPLATE = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True, slots=True)
class WorkloadReport:
    sweep: Sweep
    advice: Advice
    #: Verdicts by measures other than goodput; they may differ from the advice and from each other.
    others: tuple[Verdict, ...]
    #: The number of planned points that were not measured.
    missing: int = 0

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return (self.advice.verdict, *self.others)


@dataclass(frozen=True, slots=True)
class Report:
    plan: Plan
    slo: Slo
    workloads: tuple[WorkloadReport, ...]
    results: tuple[PointResult, ...]

    @property
    def repetitions(self) -> int:
        return len({result.point.repetition for result in self.results})

    @property
    def versions(self) -> dict[str, str]:
        """All versions that points had, by package."""
        found: dict[str, set[str]] = {}
        for result in self.results:
            for package, version in result.versions.items():
                found.setdefault(package, set()).add(version)
        return {package: ", ".join(sorted(versions)) for package, versions in sorted(found.items())}

    @property
    def band(self) -> float:
        """The largest share by which step times were changed; 0 where none were."""
        return max(result.point.sensitivity.change for result in self.results)

    @property
    def machines(self) -> list[str]:
        return sorted({result.machine for result in self.results if result.machine})

    @property
    def commands(self) -> dict[str, Mapping[str, str]]:
        """The commands of each arm's first point. Others differ in rate, arrivals and factors; report.json has all."""
        first: dict[str, Mapping[str, str]] = {}
        for result in self.results:
            first.setdefault(result.point.arm, result.commands)
        return first

    @property
    def time_scales(self) -> list[float]:
        return sorted({result.point.time_scale for result in self.results})

    @property
    def most_software(self) -> dict[str, float]:
        """The highest share of our own software by time: "ttft", "tpot", "latency"."""
        names = dict.fromkeys(name for result in self.results for name in result.software)
        return {name: max(result.software.get(name, 0.0) for result in self.results) for name in names}

    def advice(self) -> str:
        """The advice as text: one paragraph for each workload."""
        return "\n\n".join(each.advice.paragraph for each in self.workloads)


def report_of(run: RunDirectory, slo: Slo = DEFAULT_SLO) -> Report:
    """Raises ConfigError for a directory that has no plan, or nothing measured yet."""
    plan = run.plan()
    results = tuple(run.results())
    if not results:
        raise ConfigError.bad_value("run directory", str(run.path), "one in which a point has been measured")
    return Report(
        plan, slo, tuple(_workload(sweep, slo, plan) for sweep in sweeps_of(plan, results)), results
    )


def _workload(sweep: Sweep, slo: Slo, plan: Plan) -> WorkloadReport:
    gpus = sweep.arms[0].gpus
    planned = [
        point
        for point in plan.every_point
        if point.workload == sweep.workload.name and plan.arm(point.arm).gpus == gpus
    ]
    rates, percent = sweep.calm_rates, max(sweep.percentiles, default=50)
    measures = (pareto_area(), latency_at(rates, "ttft", percent), latency_at(rates, "tpot", percent))
    others = tuple(judge(sweep, measure) for measure in measures)
    return WorkloadReport(sweep, advise(sweep, slo), others, len(planned) - len(sweep.measured))


def write_report(run: RunDirectory, slo: Slo = DEFAULT_SLO) -> Report:
    """Writes the report into the run directory."""
    report = report_of(run, slo)
    plots = run.path / "plots"
    plots.mkdir(exist_ok=True)
    pictures = [
        [
            Picture(chart.render(plots / f"{chart.name}.png"), chart.caption)
            for chart in charts_of(each.sweep, slo)
        ]
        for each in report.workloads
    ]
    write_whole(run.path / "report.html", _page(report, pictures).encode())
    # Infinity and NaN, which JSON lacks, become null.
    encoded = msgspec.json.encode(_as_json(report))
    write_whole(run.path / "report.json", msgspec.json.format(encoded, indent=1) + b"\n")
    write_whole(run.path / "points.csv", _table(list(_points_of(report))).encode())
    return report


def _table(rows: list[dict[str, str | float]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


class Picture(NamedTuple):
    svg: str
    caption: str


def _page(report: Report, pictures: list[list[Picture]]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    pages = list(zip(report.workloads, pictures, strict=True))
    return page.render(report=report, pages=pages, rows=arm_rows, lead=_shown_lead, described=described)


def _shown_lead(lead: Lead) -> str:
    if math.isinf(lead.factor):
        return f"the only one; {lead.other} has none"
    more = f"{lead.factor - 1:.0%} better" if lead.factor < 2 else f"{lead.factor:.1f} times as good"
    return f"{more} than {lead.other}" if lead.factor < 2 else f"{more} as {lead.other}"


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm's row in a workload's table. A cell has the median and the spread of the repetitions."""

    arm: str
    cells: tuple[str, ...]
    is_winner: bool


def arm_rows(workload: WorkloadReport, slo: Slo) -> tuple[tuple[str, ...], list[ArmRow]]:
    """The headers, and a row for each arm, the highest goodput first."""
    sweep = workload.sweep
    goodput_verdict = workload.advice.verdict
    scores = {
        arm.name: [judged.scores.get(arm.name, {}).get(NOMINAL) for judged in workload.verdicts]
        for arm in sweep.arms
    }
    order = sorted(scores, key=lambda arm: -(first.median if (first := scores[arm][0]) else -1))
    rows = []
    for arm in order:
        knee = sweep.knee(arm, slo)
        lead = next((lead for lead in goodput_verdict.leads if lead.other == arm), None)
        is_best = bool(goodput_verdict.leads) and arm == goodput_verdict.best
        against = f"{1 / lead.factor:.0%}" if lead else "100%" if is_best else "-"
        texts = [spread(score) if score else "-" for score in scores[arm]]
        past = scores[arm][0] and past_at_every_rate(sweep, goodput_verdict.measure, arm)
        if past and lead:
            best = goodput_verdict.scores[goodput_verdict.best][NOMINAL].median
            texts[0], against = f"< {number(past)}", f"< {past / best:.0%}"
        cells = (texts[0], against, number(knee) if knee else "-", *texts[1:])
        rows.append(ArmRow(arm, cells, arm == goodput_verdict.winner))
    headers = (
        "goodput, requests/s",
        "of the best",
        "knee, requests/s",
        *(f"{verdict.measure.label}, {verdict.measure.unit}" for verdict in workload.others),
    )
    return headers, rows


def _points_of(report: Report) -> Iterator[dict[str, str | float]]:
    """One row for each measured point. A cell without a number is empty."""
    for workload in report.workloads:
        for point, measured in workload.sweep.measured.items():
            good = measured.goodput(report.slo)
            row: dict[str, Any] = {
                "workload": point.workload,
                "arm": point.arm,
                "gpus": measured.gpus,
                "rate": point.rate,
                "repetition": point.repetition,
                "prefill_factor": point.sensitivity.prefill_factor,
                "decode_factor": point.sensitivity.decode_factor,
                "time_scale": point.time_scale,
                "requests": len(measured.result.requests),
                "sent_requests_s": measured.sent_requests_s,
                "errors": measured.errors,
                "is_saturated": measured.result.is_saturated,
                "goodput_requests_s": good.requests_s,
                "goodput_tokens_s_gpu": good.tokens_s_gpu,
                "share_in_time": good.share,
                "tokens_s_user": measured.pareto_point[0],
                "tokens_s_gpu": measured.pareto_point[1],
            }
            for name, percent in product(QUANTITIES, PERCENTILES):
                row[f"{name}_p{percent}_ms"] = measured.percentile(name, percent)
            row |= {f"{part}_ms": measured.mean_parts.get(part) for part in PARTS}
            row["kv_hit_rate"] = measured.result.kv_hit_rate
            row |= {f"software_{name}": measured.result.software.get(name) for name in QUANTITIES}
            yield {name: "" if _is_missing(value) else value for name, value in row.items()}


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _as_json(report: Report) -> dict[str, Any]:
    """The content of report.json: verdicts with scores and doubts; commands and versions of each point."""
    return {
        "subject": report.plan.subject,
        "slo": report.slo.limits,
        "command": report.plan.command,
        "settings": report.plan.settings,
        "is_modelled": report.plan.is_modelled,
        "software": report.plan.software,
        "arms": report.plan.arms,
        "workloads": [
            {
                **asdict(each.sweep.workload),
                "advice": each.advice.paragraph,
                "verdicts": [_verdict_json(verdict) for verdict in each.verdicts],
            }
            for each in report.workloads
        ],
        "points": list(_points_of(report)),
        "runs": [
            {
                "point": result.point,
                "commands": result.commands,
                "versions": result.versions,
                "machine": result.machine,
                "wall_s": result.wall_s,
            }
            for result in report.results
        ],
    }


def _verdict_json(verdict: Verdict) -> Mapping[str, Any]:
    return {
        "measure": verdict.measure.label,
        "unit": verdict.measure.unit,
        "winner": verdict.winner,
        "why_not": verdict.why_not,
        "what_next": verdict.what_next,
        "left_out": list(map(str, verdict.left_out)),
        "leads": [asdict(lead) | {"doubt": str(lead.doubt)} for lead in verdict.leads],
        "scores": [
            {"arm": arm, **asdict(variant), "values": sample.values}
            for arm, by_variant in verdict.scores.items()
            for variant, sample in by_variant.items()
        ],
    }
