"""The results of `bench strategies`: a CSV, a JSON, and a page with goodput against rate and the Pareto points."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from trtllm_disagg.tools.bench.aiperf import RateResult, front
from trtllm_disagg.tools.plan.layouts import Layout
from trtllm_disagg.tools.plan.slo import Slo

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 320, 60, 40, 16
_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;margin:1rem 0}}td,th{{padding:.15rem .7rem;text-align:right}}
td:first-child,th:first-child{{text-align:left}}tr:nth-child(even){{background:#8881}}
figure{{display:inline-block;margin:0 1rem 1rem 0}}svg text{{font-size:11px;fill:currentColor}}</style>
<h1>{title}</h1><p>Limits: {slo}. Goodput is the offered rate times the share of answers within the limits.
A Pareto point has more tokens/s for a user, or more for a GPU, than every other point.
results.csv and results.json have every number.</p>"""


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
    page.write_text("\n".join(_page(subject, slo, rows)), encoding="utf-8")
    return page


def _page(subject: str, slo: Slo, rows: Sequence[Row]) -> Iterator[str]:
    yield _HEAD.format(title=html.escape(f"bench strategies: {subject}"), slo=html.escape(str(slo)))

    def key(row: Row) -> tuple[str, int]:
        return row.workload, row.gpus

    for (workload, gpus), group in groupby(sorted(rows, key=key), key):
        own = list(group)
        layouts = list(dict.fromkeys(row.layout for row in own))
        colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(layouts)}
        pareto = set(front((row.tokens_s_user, row.tokens_s_gpu) for row in own))
        yield f"<h2>{html.escape(workload)} on {gpus} GPUs</h2>"
        goodput = [(row.layout, row.rate, row.goodput, False) for row in own]
        yield _chart("goodput against rate, requests/s", goodput, colours, lines=True)
        places = [(row.layout, row.tokens_s_user, row.tokens_s_gpu) for row in own]
        shown = [(*place, place[1:] in pareto) for place in places]
        title = "tokens/s/GPU against tokens/s/user; Pareto points are filled"
        yield _chart(title, shown, colours, lines=False)
        yield _table(own)


def _table(rows: Iterable[Row]) -> str:
    heads = "".join(f"<th>{heading}</th>" for heading in ("layout", *_SHOWN.values()))
    lines = (
        f"<tr><td>{html.escape(row.layout)}</td>"
        + "".join(f"<td>{getattr(row, name):.3g}</td>" for name in _SHOWN)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{heads}</tr>{''.join(lines)}</table>"


def _chart(
    title: str, points: Sequence[tuple[str, float, float, bool]], colours: dict[str, str], *, lines: bool
) -> str:
    """An SVG. `points`: layout, x, y, whether it is filled."""
    most_x = max((x for _, x, _, _ in points), default=0) * 1.05 or 1.0
    most_y = max((y for _, _, y, _ in points), default=0) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / most_x * (_WIDTH - _LEFT - 8),
            _HEIGHT - _BOTTOM - y / most_y * (_HEIGHT - _BOTTOM - _TOP),
        )

    drawn = [f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH}" fill="none" stroke="currentColor"/>']
    for share in (0.25, 0.5, 0.75, 1.0):
        x, y = place(share * most_x, share * most_y)
        drawn.append(
            f'<text x="{x:.0f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{share * most_x:.3g}</text>'
        )
        drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{share * most_y:.3g}</text>')
    for layout, colour in colours.items():
        own = [(*place(x, y), filled) for name, x, y, filled in points if name == layout]
        if lines:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in own)
            drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, filled in own:
            fill = colour if filled or lines else "none"
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}"/>')
    names = (f'<span style="color:{colour}">&#9679; {html.escape(n)}</span>' for n, colour in colours.items())
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    svg = f'<svg {size} role="img" aria-label="{html.escape(title)}">{"".join(drawn)}</svg>'
    return f"<figure>{svg}<figcaption>{html.escape(title)}<br>{' '.join(names)}</figcaption></figure>"
