"""Parses /metrics pages into series, and selects those of a PromQL expression."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.deployments import ROOT

ALERTS = ROOT / "deploy" / "observability" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "observability" / "grafana-dashboard.json"


@cache
def expressions() -> dict[str, str]:
    """The expressions of our dashboard and alerts."""
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$namespace", ".*")
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


class Series(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def series_of(page: str) -> list[Series]:
    # The parser appends `_total` to every counter.
    names = set(re.findall(r"^\w+", page, re.MULTILINE))
    return [
        Series(s.name if s.name in names else s.name.removesuffix("_total"), s.labels, s.value)
        for family in text_string_to_metric_families(page)
        for s in family.samples
    ]


def selectors(expression: str) -> list[Any]:
    """The vector selectors of a valid PromQL expression."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return list({str(each): each for each in found}.values())


def selected(expression: str, series: Iterable[Series]) -> Iterator[Series]:
    """The series of one selector."""
    (selector,) = selectors(expression)
    return (each for each in series if asks_for(selector, each))


def asks_for(selector: Any, series: Series) -> bool:
    matchers = selector.matchers.matchers
    return bool(series.name == selector.name) and all(
        _fits(each, series.labels.get(each.name, "")) for each in matchers
    )


def _fits(matcher: Any, value: str) -> bool:
    operations = promql_parser.MatchOp
    if matcher.op in (operations.Equal, operations.NotEqual):
        return bool((value == matcher.value) is (matcher.op == operations.Equal))
    return bool(re.fullmatch(matcher.value, value)) is (matcher.op == operations.Re)
