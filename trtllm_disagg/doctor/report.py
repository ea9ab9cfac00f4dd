"""What `doctor` prints: a table and a sentence for each finding, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_disagg.doctor.diagnosis import FINE, Row
from trtllm_disagg.doctor.pair import Pair
from trtllm_disagg.doctor.rules import Severity

_STYLES = {FINE: "green", Severity.NOTE.value: "yellow", Severity.ERROR.value: "bold red"}
#: rich would cut a table in a file to 80.
_WIDTH = 120


def to_json(pair: Pair, rows: Sequence[Row]) -> str:
    counts = _counts(rows)
    return json.dumps(
        {
            "prefill": pair.prefill.source,
            "decode": pair.decode.source,
            "trtllm_version": str(pair.deployment.trtllm_version),
            "strategy": pair.deployment.strategy,
            "errors": counts[Severity.ERROR.value],
            "notes": counts[Severity.NOTE.value],
            "rows": [asdict(row) for row in rows],
        },
        indent=2,
        default=str,
    )


def show(pair: Pair, rows: Sequence[Row], console: Console | None = None) -> None:
    console = console or _console()
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for column in ("", "", f"prefill {pair.prefill.source}", f"decode {pair.decode.source}"):
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(Text(row.rule), verdict, Text(_shown(row.prefill)), Text(_shown(row.decode)))
    console.print(table)
    for row in rows:
        if row.verdict != FINE:
            console.print(
                Text.assemble((f"{row.verdict} ", _STYLES[row.verdict]), f"{row.rule}: {row.instead}")
            )
            console.print(Text(f"      because {row.why}", style="dim"))
    counts = _counts(rows)
    console.print(
        f"{counts[Severity.ERROR.value]} errors, {counts[Severity.NOTE.value]} notes; "
        f"TensorRT-LLM {pair.deployment.trtllm_version}, {pair.deployment.strategy}"
    )


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def _counts(rows: Sequence[Row]) -> Counter[str]:
    return Counter(row.verdict for row in rows)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
