"""The rules, asked of one pair; and what `doctor` prints of a pair or a deployment: a table and a sentence for each
finding, or JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from trtllm_disagg.config.engine_args import build_engine_args, with_engine_args
from trtllm_disagg.console import Console
from trtllm_disagg.errors import ConfigError, harmless
from trtllm_disagg.tools.doctor.pair import ANY_MODEL, Pair
from trtllm_disagg.tools.doctor.rules import FINE, RULES, UNKNOWN, Problem, Rule, Severity

if TYPE_CHECKING:
    from trtllm_disagg.tools.doctor.deployment import Finding, Observed

_STYLES = {FINE: "green", Severity.NOTE.value: "yellow", UNKNOWN: "yellow", Severity.ERROR.value: "bold red"}
#: Columns of the output in a file.
_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Row:
    rule: str
    #: ok, note or error.
    verdict: str
    prefill: Any
    decode: Any
    why: str
    #: What to do; empty when it is ok.
    instead: str


def diagnose(pair: Pair) -> list[Row]:
    rows = [_row(rule, rule.check(pair), pair) for rule in RULES]
    if not has_errors(rows):
        rows.append(_accepted(pair))
    return rows


def has_errors(rows: Sequence[Row | Finding]) -> bool:
    return any(row.verdict == Severity.ERROR for row in rows)


def _row(rule: Rule, problem: Problem | None, pair: Pair) -> Row:
    return Row(
        rule.name,
        FINE if problem is None else problem.severity.value,
        rule.value(pair.prefill),
        rule.value(pair.decode),
        rule.why,
        "" if problem is None else problem.instead,
    )


def _accepted(pair: Pair) -> Row:
    """The worker's own checks, which may find more than the rules."""
    refusals = []
    for side in pair.sides:
        file = side.config.extra_engine_args
        # The model of a worker's flags is where the worker starts; that of --model, or of its file, has to be here.
        here = side.model if side.config.model == ANY_MODEL else None
        config = replace(
            side.config,
            model=here or ANY_MODEL,
            extra_engine_args=file if os.path.exists(file) else "",
        )
        try:
            with_engine_args(config, build_engine_args(config))
        except ConfigError as error:
            refusals.append(str(error))
    verdict = Severity.ERROR.value if refusals else FINE
    return Row("worker", verdict, "", "", "`trtllm-disagg worker` starts with them", "; ".join(refusals))


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


def show(pair: Pair, rows: Sequence[Row]) -> None:
    cells = [(row, (_shown(row.prefill), _shown(row.decode))) for row in rows]
    _show(
        cells,
        (f"prefill {pair.prefill.source}", f"decode {pair.decode.source}"),
        f"TensorRT-LLM {pair.deployment.trtllm_version}, {pair.deployment.strategy}",
    )


def show_live(seen: Observed, found: Sequence[Finding]) -> None:
    cells = [(finding, (finding.value,)) for finding in found]
    _show(cells, (seen.url,), f"{seen.model} at {seen.url}")


def _show(
    rows: Sequence[tuple[Row | Finding, tuple[str, ...]]],
    columns: tuple[str, ...],
    about: str,
) -> None:
    console = Console(paper=_WIDTH)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for column in ("", "", *columns):
        table.add_column(Text(column), overflow="fold")
    for row, cells in rows:
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(Text(row.rule), verdict, *(Text(harmless(cell)) for cell in cells))
    console.print(table)
    for instead, same in _together([row for row, _ in rows if row.verdict != FINE]):
        names = ", ".join(row.rule for row in same)
        console.print(
            Text.assemble((f"{same[0].verdict} ", _STYLES[same[0].verdict]), f"{names}: {harmless(instead)}")
        )
        console.print(Text(f"      because {'; '.join(row.why for row in same)}", style="dim"))
    counts = _counts([row for row, _ in rows])
    unknown = f", {counts[UNKNOWN]} {UNKNOWN}" if counts[UNKNOWN] else ""
    total = ", ".join(_counted(counts[kind.value], kind.value) for kind in (Severity.ERROR, Severity.NOTE))
    console.print(Text(f"{total}{unknown}; {about}"))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _together(rows: Iterable[Row | Finding]) -> Iterator[tuple[str, list[Row | Finding]]]:
    """Consecutive findings with the same advice are printed together."""
    for (instead, _), same in groupby(rows, lambda row: (row.instead, row.verdict)):
        yield instead, list(same)


def _counts(rows: Sequence[Row | Finding]) -> Counter[str]:
    return Counter(row.verdict for row in rows)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
