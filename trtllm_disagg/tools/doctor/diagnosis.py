"""Applies the rules to a pair, and prints findings as a table with advice, or as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from trtllm_disagg.common.console import Console
from trtllm_disagg.config.engine_args import build_engine_args, with_engine_args
from trtllm_disagg.errors import ConfigError, harmless
from trtllm_disagg.tools.doctor.pair import ANY_MODEL, Pair
from trtllm_disagg.tools.doctor.rules import FINE, RULES, UNKNOWN, Finding, Severity

_STYLES = {FINE: "green", Severity.NOTE.value: "yellow", UNKNOWN: "yellow", Severity.ERROR.value: "bold red"}
#: Columns when the output is a file.
_WIDTH = 120


def diagnose(pair: Pair) -> list[Finding]:
    found = [
        Finding(
            rule.name,
            FINE if (problem := rule.problem(pair)) is None else problem.severity.value,
            {stage.role.value: rule.value(stage) for stage in pair.stages},
            rule.why,
            "" if problem is None else problem.instead,
        )
        for rule in RULES
    ]
    return found if has_errors(found) else [*found, _accepted(pair)]


def has_errors(found: Sequence[Finding]) -> bool:
    return any(finding.verdict == Severity.ERROR for finding in found)


def _accepted(pair: Pair) -> Finding:
    """The worker's own checks, which can find more than the rules."""
    refusals = []
    for stage in pair.stages:
        file = stage.config.extra_engine_args
        # The model of the flags is on the worker's machine; only that of --model or the file must be here.
        here = stage.model if stage.config.model == ANY_MODEL else None
        config = replace(
            stage.config, model=here or ANY_MODEL, extra_engine_args=file if os.path.exists(file) else ""
        )
        try:
            with_engine_args(config, build_engine_args(config))
        except ConfigError as error:
            refusals.append(str(error))
    verdict = Severity.ERROR.value if refusals else FINE
    why = "`trtllm-disagg worker` makes these checks at its start"
    return Finding(
        "worker", verdict, {stage.role.value: "" for stage in pair.stages}, why, "; ".join(refusals)
    )


def to_json(about: Mapping[str, str], found: Sequence[Finding]) -> str:
    """`about`: what was checked, by name."""
    counts = Counter(finding.verdict for finding in found)
    rows = [
        {"rule": each.rule, "verdict": each.verdict, **each.values, "why": each.why, "instead": each.instead}
        for each in found
    ]
    numbers = {"errors": counts[Severity.ERROR], "notes": counts[Severity.NOTE], "not_known": counts[UNKNOWN]}
    return json.dumps({**about, **numbers, "rows": rows}, indent=2, default=str)


def show(found: Sequence[Finding], columns: Sequence[str], about: str) -> None:
    """`columns`: headings of the values."""
    console = Console(paper=_WIDTH)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for column in ("", "", *columns):
        table.add_column(Text(column), overflow="fold")
    for finding in found:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        cells = ("-" if value is None else str(value) for value in finding.values.values())
        table.add_row(Text(finding.rule), verdict, *(Text(harmless(cell)) for cell in cells))
    console.print(table)
    # Adjacent findings with the same advice share one line.
    broken = (finding for finding in found if finding.verdict != FINE)
    for (instead, verdict), same in groupby(broken, lambda finding: (finding.instead, finding.verdict)):
        rules = list(same)
        names = ", ".join(rule.rule for rule in rules)
        console.print(Text.assemble((f"{verdict} ", _STYLES[verdict]), f"{names}: {harmless(instead)}"))
        console.print(Text(f"      because {'; '.join(rule.why for rule in rules)}", style="dim"))
    counts = Counter(finding.verdict for finding in found)
    unknown = f", {counts[UNKNOWN]} {UNKNOWN}" if counts[UNKNOWN] else ""
    total = ", ".join(_counted(counts[kind.value], kind.value) for kind in (Severity.ERROR, Severity.NOTE))
    console.print(Text(f"{total}{unknown}; {about}"))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
