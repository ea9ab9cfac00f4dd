"""The rules, asked of one pair."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.doctor.pair import ANY_MODEL, Pair
from trtllm_disagg.doctor.rules import RULES, Problem, Rule, Severity
from trtllm_disagg.errors import ConfigError

FINE = "ok"
#: Of a deployment: what could not be seen. Never a guess.
UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Row:
    rule: str
    #: ok, note or error.
    verdict: str
    prefill: Any
    decode: Any
    why: str
    #: Empty when it is ok.
    instead: str


def diagnose(pair: Pair, rules: Sequence[Rule] = RULES) -> list[Row]:
    rows = [_row(rule, rule.check(pair), pair) for rule in rules]
    if not has_errors(rows):
        rows.append(_accepted(pair))
    return rows


class _Judged(Protocol):
    @property
    def verdict(self) -> str: ...


def has_errors(rows: Sequence[_Judged]) -> bool:
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
    """Whatever the rules do not know, the worker's own checks may."""
    refusals = []
    for side in pair.sides:
        is_file = os.path.exists(side.source)
        config = replace(
            side.config, model=side.model or ANY_MODEL, extra_engine_args=side.source if is_file else ""
        )
        try:
            build_engine_args(config)
        except ConfigError as error:
            refusals.append(str(error))
    verdict = Severity.ERROR.value if refusals else FINE
    return Row("worker", verdict, "", "", "`trtllm-disagg worker` starts with them", "; ".join(refusals))
