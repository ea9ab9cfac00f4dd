"""What `doctor` prints: a table and a sentence for each finding, or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Protocol

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from trtllm_disagg.console import Console
from trtllm_disagg.doctor.diagnosis import FINE, UNKNOWN, Row
from trtllm_disagg.doctor.live import Observed
from trtllm_disagg.doctor.live_rules import Finding
from trtllm_disagg.doctor.pair import Pair
from trtllm_disagg.doctor.rules import Severity

_STYLES = {FINE: "green", Severity.NOTE.value: "yellow", UNKNOWN: "yellow", Severity.ERROR.value: "bold red"}
#: In a file.
_WIDTH = 120


def live_to_json(seen: Observed, found: Sequence[Finding]) -> str:
    counts = _counts(found)
    return json.dumps(
        {
            "url": seen.url,
            "model": seen.model,
            "errors": counts[Severity.ERROR.value],
            "notes": counts[Severity.NOTE.value],
            "not_known": counts[UNKNOWN],
            "rows": [asdict(finding) for finding in found],
        },
        indent=2,
    )


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
    told = [(row, (_shown(row.prefill), _shown(row.decode))) for row in rows]
    _show(
        told,
        (f"prefill {pair.prefill.source}", f"decode {pair.decode.source}"),
        f"TensorRT-LLM {pair.deployment.trtllm_version}, {pair.deployment.strategy}",
        console or Console(paper=_WIDTH),
    )


def show_live(seen: Observed, found: Sequence[Finding], console: Console | None = None) -> None:
    told = [(finding, (finding.value,)) for finding in found]
    _show(told, (seen.url,), f"{seen.model} at {seen.url}", console or Console(paper=_WIDTH))


class Verdict(Protocol):
    """A row or a finding."""

    @property
    def rule(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def instead(self) -> str: ...


def _show(
    rows: Sequence[tuple[Verdict, tuple[str, ...]]], columns: tuple[str, ...], about: str, console: Console
) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for column in ("", "", *columns):
        table.add_column(Text(column), overflow="fold")
    for row, cells in rows:
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(Text(row.rule), verdict, *map(Text, cells))
    console.print(table)
    for told, same in _together([row for row, _ in rows if row.verdict != FINE]):
        names = ", ".join(row.rule for row in same)
        console.print(Text.assemble((f"{same[0].verdict} ", _STYLES[same[0].verdict]), f"{names}: {told}"))
        console.print(Text(f"      because {'; '.join(row.why for row in same)}", style="dim"))
    counts = _counts([row for row, _ in rows])
    unknown = f", {counts[UNKNOWN]} {UNKNOWN}" if counts[UNKNOWN] else ""
    told = ", ".join(_counted(counts[kind.value], kind.value) for kind in (Severity.ERROR, Severity.NOTE))
    console.print(f"{told}{unknown}; {about}")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _together(rows: Iterable[Verdict]) -> Iterator[tuple[str, list[Verdict]]]:
    """Neighbours with one answer to them are told at once."""
    for (told, _), same in groupby(rows, lambda row: (row.instead, row.verdict)):
        yield told, list(same)


def _counts(rows: Sequence[Verdict]) -> Counter[str]:
    return Counter(row.verdict for row in rows)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
