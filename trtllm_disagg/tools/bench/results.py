"""The results of `bench strategies`: a CSV, a JSON, and a page with goodput against rate and the Pareto points."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import msgspec
from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_disagg.tools.bench.aiperf import RateResult, front
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import Slo

_COLUMNS, _BAR = 160, 24
_HEAD = """bench strategies: {subject}

Limits: {slo}. Goodput is the offered rate times the share of answers within the limits.
* A Pareto point has more tokens/s for a user, or more for a GPU, than every other point.
results.csv and results.json have every number."""


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
    "": "goodput",
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
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False)
    console.print(_HEAD.format(subject=subject, slo=slo), markup=False)

    def key(row: Row) -> tuple[str, int]:
        return row.workload, row.gpus

    for (workload, gpus), group in groupby(sorted(rows, key=key), key):
        console.print(f"\n{workload} on {gpus} GPUs", style="bold", markup=False)
        console.print(_table(list(group)))
    return console.export_html()


def _table(rows: Sequence[Row]) -> Table:
    """A group of rows for each layout, with a bar of its goodput at each rate."""
    pareto = set(front((row.tokens_s_user, row.tokens_s_gpu) for row in rows))
    most = max(row.goodput for row in rows) or 1.0
    table = Table(box=SIMPLE_HEAD)
    table.add_column("layout", no_wrap=True)
    for heading in _SHOWN.values():
        table.add_column(heading, justify="right")
    for _, group in groupby(rows, lambda row: row.layout):
        table.add_section()
        for row in group:
            star = " *" if (row.tokens_s_user, row.tokens_s_gpu) in pareto else ""
            numbers = (f"{getattr(row, name):.3g}" for name in _SHOWN if name)
            table.add_row(Text(row.layout + star), *numbers, Bar(most, 0, row.goodput, width=_BAR))
    return table
