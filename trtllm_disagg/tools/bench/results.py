"""The results of `bench strategies`: a CSV, a JSON, and a page of charts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import msgspec

from trtllm_disagg.tools.bench.aiperf import RateResult, front
from trtllm_disagg.tools.plan.chart import Chart
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import Slo

_HEAD = """<!doctype html><meta charset="utf-8"><title>bench strategies</title>
<style>body {{font: 14px sans-serif}} table {{border-collapse: collapse}}
td, th {{text-align: right; padding: 2px 8px; white-space: nowrap}}
tr :first-child {{text-align: left}} tr.new td {{border-top: 1px solid #ccc}}</style>
<h1>{subject}</h1>
<p>Limits: {slo}. Goodput is the offered rate times the share of answers within the limits. * A Pareto point has more
tokens/s for a user, or more for a GPU, than every other point. results.csv and results.json have every number.</p>
"""


class Row(msgspec.Struct, frozen=True):
    """One layout at one rate, on the modelled clock. Times in milliseconds, rates in requests/s."""

    workload: str
    gpus: int
    layout: str
    rate: float
    goodput: float
    good_share: float
    requests_s: float
    tokens_s_gpu: float
    tokens_s_user: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    error_percent: float

    @classmethod
    def of(cls, layout: Layout, workload: str, result: RateResult, scale: float) -> Row:
        """`result` is on the wall's clock, `scale` times as slow as the modelled one."""
        rate = result.rate * scale
        first, token = result.time_to_first_token, result.inter_token_latency
        return cls(
            workload=workload,
            gpus=layout.gpus,
            layout=layout.name,
            rate=rate,
            goodput=rate * result.good_share,
            good_share=result.good_share,
            requests_s=result.request_throughput.avg * scale,
            tokens_s_gpu=result.output_token_throughput.avg * scale / layout.gpus,
            tokens_s_user=result.output_token_throughput_per_user.p50 * scale,
            ttft_p50=first.p50 / scale,
            ttft_p99=first.p99 / scale,
            tpot_p50=token.p50 / scale,
            tpot_p99=token.p99 / scale,
            error_percent=result.request_error_rate.avg,
        )


#: Columns of the page's table, with their headings.
_SHOWN = {
    "rate": "requests/s offered",
    "goodput": "goodput",
    "tokens_s_gpu": "tok/s/GPU",
    "tokens_s_user": "tok/s/user",
    "ttft_p50": "TTFT p50 ms",
    "ttft_p99": "p99",
    "tpot_p50": "TPOT p50 ms",
    "tpot_p99": "p99",
    "error_percent": "errors %",
}


def write_results(out: Path, subject: str, slo: Slo, rows: Sequence[Row]) -> Path:
    """Writes results.csv, results.json and results.html into `out`. Returns the page."""
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    text = io.StringIO()
    writer = csv.DictWriter(text, Row.__struct_fields__, lineterminator="\n")
    writer.writeheader()
    writer.writerows(msgspec.structs.asdict(row) for row in rows)
    (out / "results.csv").write_text(text.getvalue())
    page = out / "results.html"
    page.write_text(_page(subject, slo, rows), encoding="utf-8")
    return page


def _page(subject: str, slo: Slo, rows: Sequence[Row]) -> str:
    def key(row: Row) -> tuple[str, int]:
        return row.workload, row.gpus

    parts = [_HEAD.format(subject=escape(subject), slo=slo)]
    for (workload, gpus), group in groupby(sorted(rows, key=key), key):
        same = list(group)
        parts.append(f"<h2>{escape(workload)} on {gpus} GPUs</h2>\n")
        parts += (chart.svg() for chart in _charts(same, str(slo)))
        parts.append(_table(same))
    return "".join(parts)


def _charts(rows: Sequence[Row], slo: str) -> Iterator[Chart]:
    layouts = {name: list(group) for name, group in groupby(rows, lambda row: row.layout)}
    most = max(row.rate for row in rows)
    goodput = {name: [(row.rate, row.goodput) for row in same] for name, same in layouts.items()}
    title, all_in_time = f"Goodput: within {slo}", ("all", [(0.0, 0.0), (most, most)])
    yield Chart(title, "requests/s offered", "requests/s in time", goodput, all_in_time)
    tokens = {name: [(row.tokens_s_user, row.tokens_s_gpu) for row in same] for name, same in layouts.items()}
    pareto = "Pareto points", list(front(point for points in tokens.values() for point in points))
    yield Chart("Tokens", "tokens/s for a user", "tokens/s for a GPU", tokens, pareto, are_joined=False)


def _table(rows: Sequence[Row]) -> str:
    pareto = set(front((row.tokens_s_user, row.tokens_s_gpu) for row in rows))
    lines, above = (
        [f"<table><tr><th>layout</th>{''.join(f'<th>{each}</th>' for each in _SHOWN.values())}</tr>"],
        "",
    )
    for row in rows:
        star = " *" * ((row.tokens_s_user, row.tokens_s_gpu) in pareto)
        numbers = "".join(f"<td>{getattr(row, name):.3g}</td>" for name in _SHOWN)
        new = ' class="new"' * (row.layout != above)
        lines.append(f"<tr{new}><td>{escape(row.layout)}{star}</td>{numbers}</tr>")
        above = row.layout
    return "\n".join([*lines, "</table>\n"])
