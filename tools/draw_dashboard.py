"""Draws our dashboard's panels from real data, without Grafana: `python -m tools.draw_dashboard PAGE... --out SVG`.

Starts Prometheus (Debian's package `prometheus`) on the given /metrics pages, HOST:PORT each, for --seconds, then sends
it every panel's queries as Grafana would. The caller has to make load meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tools.grafana_dashboard import ROWS, Panel
from trtllm_disagg.tools.up.ports import free_http_port

HOST = "127.0.0.1"
SCRAPE_SECONDS = 2
COLUMNS, WIDTH, HEIGHT, PAD = 4, 300, 170, 44
COLOURS = ("#3274d9", "#e0752d", "#299c46", "#a352cc", "#c4162a", "#0aa2a2", "#8f8f2f", "#555555")
UNITS = {"s": "s", "reqps": "/s", "Bps": "B/s", "percentunit": "", "short": ""}


class Line(NamedTuple):
    legend: str
    points: Sequence[tuple[float, float]]


@contextlib.contextmanager
def prometheus(pages: Sequence[str], directory: Path) -> Iterator[str]:
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [{"job_name": "dynamo", "static_configs": [{"targets": list(pages)}]}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(config))
    address = f"{HOST}:{free_http_port(HOST, 0)}"
    command = (
        "prometheus",
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
    )
    process = subprocess.Popen([*command, f"--web.listen-address={address}", "--log.level=error"])
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def asked(url: str, query: str, begin: float, end: float) -> list[dict[str, Any]]:
    arguments = {"query": query, "start": begin, "end": end, "step": SCRAPE_SECONDS}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(arguments)}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def lines_of(panel: Panel, url: str, begin: float, end: float) -> list[Line]:
    lines = []
    for legend, query in panel.queries.items():
        expression = query.replace("$__rate_interval", f"{5 * SCRAPE_SECONDS}s").replace("$namespace", ".*")
        for result in asked(url, expression, begin, end):
            points = [(float(at), float(value)) for at, value in result["values"] if value != "NaN"]
            if any(value for _, value in points):
                lines.append(Line(named(legend, result["metric"]), points))
    return lines


def named(legend: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value[-4:] if name == "worker_id" else value)
    return legend


def shown(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.2g}{letter}"
    return f"{value:.3g}"


def drawn(panel: Panel, lines: Sequence[Line], begin: float, end: float) -> Iterator[str]:
    most = max((value for line in lines for _, value in line.points), default=1.0) or 1.0
    bottom, height, width = HEIGHT - PAD - 14, HEIGHT - PAD - 38, WIDTH - PAD - 16
    yield f'<text x="8" y="16" class="title">{escape(panel.title)}</text>'
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * height
        yield f'<path d="M{PAD} {y:.0f}h{width}" class="grid"/>'
        label = f"{shown(share * most)}{UNITS[panel.unit]}" if share else "0"
        yield f'<text x="{PAD - 3}" y="{y + 3:.0f}" class="axis" text-anchor="end">{label}</text>'
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        places = (
            f"{PAD + (at - begin) / (end - begin) * width:.1f},{bottom - value / most * height:.1f}"
            for at, value in line.points
        )
        yield f'<polyline points="{" ".join(places)}" stroke="{colour}"/>'
        x, y = 8 + number % 2 * WIDTH / 2, bottom + 16 + number // 2 * 11
        if number < 6:
            yield f'<text x="{x:.0f}" y="{y:.0f}" class="legend" fill="{colour}">{escape(line.legend)}</text>'
    if not lines:
        yield f'<text x="{WIDTH / 2}" y="{bottom - height / 2}" class="axis" text-anchor="middle">0</text>'


def picture(url: str, begin: float, end: float) -> str:
    panels = [panel for row in ROWS.values() for panel in row if "modelled" not in panel.title]
    parts = []
    for number, panel in enumerate(panels):
        x, y = number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT
        body = "".join(drawn(panel, lines_of(panel, url, begin, end), begin, end))
        box = f'<path d="M2 2h{WIDTH - 4}v{HEIGHT - 4}h-{WIDTH - 4}z" class="box"/>'
        parts.append(f'<g transform="translate({x} {y})">{box}{body}</g>')
    width, height = COLUMNS * WIDTH, math.ceil(len(panels) / COLUMNS) * HEIGHT
    style = (
        "text{font-family:sans-serif;font-size:9px}.title{font-size:11px;font-weight:bold}.axis{fill:#777}"
        ".grid{stroke:#ddd}.box{fill:#fff;stroke:#ccc}polyline{fill:none;stroke-width:1.5}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>'
    return "\n".join([head, *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", metavar="HOST:PORT")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, prometheus(options.pages, Path(directory)) as url:
        begin = time.time()
        time.sleep(options.seconds)
        options.out.write_text(picture(url, begin, time.time()))


if __name__ == "__main__":
    main()
