"""Writes deploy/observability/grafana-dashboard.json: `python -m tools.grafana_dashboard`. The panels are a table here;
the rest of a dashboard's thousand lines of JSON follows from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).parents[1] / "deploy" / "observability" / "grafana-dashboard.json"
RATE = "[$__rate_interval]"
HERE = 'dynamo_namespace=~"$namespace"'


class Panel(NamedTuple):
    title: str
    unit: str
    #: Legend -> PromQL.
    queries: dict[str, str]
    text: str


def rate(metric: str, by: str = "", where: str = "") -> str:
    matchers = ", ".join(each for each in (HERE, where) if each)
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{{matchers}}}{RATE}))"


def quantiles(metric: str, where: str = "", *, at: tuple[float, ...] = (0.5, 0.99)) -> dict[str, str]:
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rate(metric + '_bucket', 'le', where)})" for q in at}


def gauge(metric: str, by: str = "worker_id", how: str = "max") -> str:
    return f"{how} by ({by}) ({metric}{{{HERE}}})"


OURS = "trtllm_disagg"
ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests by role",
            "reqps",
            {
                # Dynamo's own dynamo_component_requests_total also counts what workers tell and ask each other.
                "{{dynamo_component}}": rate(f"{OURS}_request_seconds_count", "dynamo_component")
            },
            "Requests and phases that ended on prefill workers (prefill), and on decode and agg workers (backend).",
        ),
        Panel(
            "What ran, and why",
            "reqps",
            {"{{strategy}}: {{reason}}": rate(f"{OURS}_requests_total", "strategy, reason")},
            "Whole requests by the order that ran and the decider's reason; local: both phases on one worker.",
        ),
        Panel(
            "Fallbacks",
            "reqps",
            {"{{to}} after {{cause}}": rate(f"{OURS}_fallbacks_total", "to, cause")},
            "Fallback steps after a failure, several for some requests. 0 on a healthy deployment.",
        ),
        Panel(
            "Clients that left, requests refused",
            "reqps",
            {
                "left {{point}}": rate(f"{OURS}_cancelled_total", "point", 'phase="whole"'),
                "refused (529)": rate(f"{OURS}_requests_shed_total"),
            },
            "Many clients that leave before the first token: they wait too long for it.",
        ),
    ),
    "Where the time goes": (
        Panel(
            "First tokens on the worker",
            "s",
            quantiles(f"{OURS}_first_chunk_seconds", 'phase="whole"'),
            "From a request's arrival on the first stage to its first token.",
        ),
        Panel(
            "From the first token to the second",
            "s",
            quantiles(f"{OURS}_second_chunk_gap_seconds", 'phase="whole"'),
            "With two stages: the handoff, the KV transfer, decode's queue and its first step.",
        ),
        Panel(
            "Phases on second stages, p99",
            "s",
            {
                "prefill": quantiles(f"{OURS}_request_seconds", 'phase="prefill"', at=(0.99,))["p99"],
                "decode": quantiles(f"{OURS}_request_seconds", 'phase="decode"', at=(0.99,))["p99"],
            },
            "The time that the called worker took.",
        ),
        Panel(
            "Time in the engine's queue",
            "s",
            quantiles("trtllm_request_queue_time_seconds", at=(0.9, 0.99)),
            "From a request's arrival in the engine to its first step.",
        ),
        Panel(
            "TTFT as clients see it",
            "s",
            {
                name: query.replace(HERE, "")
                for name, query in quantiles("dynamo_frontend_time_to_first_token_seconds").items()
            },
            "Measured by the frontend; includes routing, both stages and the network.",
        ),
        Panel(
            "ITL as clients see it",
            "s",
            {
                name: query.replace(HERE, "")
                for name, query in quantiles("dynamo_frontend_inter_token_latency_seconds").items()
            },
            "Measured by the frontend.",
        ),
    ),
    "KV": (
        Panel(
            "KV transfers",
            "s",
            quantiles(f"{OURS}_kv_transfer_seconds"),
            "How long the KV transfer of a request took.",
        ),
        Panel(
            "KV moved, and saved",
            "Bps",
            {
                "moved": rate(f"{OURS}_kv_transfer_bytes_sum"),
                "saved": rate(f"{OURS}_kv_bytes_saved_total"),
            },
            "Saved: the receiver already had those blocks (embedded engine).",
        ),
        Panel(
            "Handoffs held, and the oldest one",
            "short",
            {
                "held by {{worker_id}}": gauge(f"{OURS}_handoffs_held"),
                "seconds, {{worker_id}}": gauge(f"{OURS}_handoffs_oldest_seconds"),
            },
            "Finished prefills with KV that waits for decode. A growing age is KV that no decode worker fetches.",
        ),
        Panel(
            "KV pools in use",
            "percentunit",
            {
                "{{dynamo_component}} {{worker_id}}": gauge(
                    "dynamo_component_gpu_cache_usage_percent", "dynamo_component, worker_id"
                )
            },
            "Used by running requests and held handoffs.",
        ),
    ),
    "Workers": (
        Panel(
            "Tokens",
            "short",
            {
                "prefilled/s": rate(f"{OURS}_prefill_tokens_total"),
                "decoded/s": rate(f"{OURS}_decode_tokens_total"),
                "relayed/s": rate(f"{OURS}_relayed_tokens_total"),
            },
            "Relayed: generated by a worker of the other role, and passed on to the frontend by this one.",
        ),
        Panel(
            "First tokens, by source",
            "reqps",
            {"{{source}}": rate(f"{OURS}_first_tokens_total", "source")},
            "own_engine: from the worker's own engine, without another worker.",
        ),
        Panel(
            "Waiting",
            "short",
            {
                "requests, {{worker_id}}": gauge(f"{OURS}_queued_requests"),
                "open breakers, {{worker_id}}": gauge(f"{OURS}_breakers_open"),
            },
            "Requests without a first token yet, and workers that are skipped because they fail.",
        ),
        Panel(
            "Lateness of the modelled engine",
            "percentunit",
            {
                "{{worker_id}}": f"{rate(f'{OURS}_modelled_late_seconds_total', 'worker_id')} / "
                f"{rate(f'{OURS}_modelled_step_seconds_total', 'worker_id')}"
            },
            "Only --engine modelled: as a share of step times. A high share means that this machine is too slow.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for row, of_row in ROWS.items():
        panels.append({"type": "row", "title": row, "gridPos": _place(0, y, 24, 1), "panels": []})
        y += 1
        width = 24 // (4 if len(of_row) % 4 == 0 else 3)
        for number, panel in enumerate(of_row):
            column, line = number % (24 // width), number // (24 // width)
            panels.append(_panel(panel, _place(column * width, y + 8 * line, width, 8)))
        y += 8 * (1 + (len(of_row) - 1) // (24 // width))
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "title": "trtllm_disagg",
        "uid": "trtllm-disagg",
        "tags": ["dynamo", "trtllm_disagg"],
        "schemaVersion": 40,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_DATASOURCE, _NAMESPACE]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_DATASOURCE = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
_NAMESPACE = {
    "name": "namespace",
    "type": "query",
    "label": "Dynamo namespace",
    "datasource": _SOURCE,
    "query": "label_values(trtllm_disagg_requests_shed_total, dynamo_namespace)",
    "refresh": 2,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "range": True}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
