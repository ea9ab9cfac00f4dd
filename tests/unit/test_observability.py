"""The page of metrics, the dashboard and the alerts are those of this code, and Prometheus can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache

import promql_parser
import pytest
import yaml

from tests.support.deployments import ROOT
from tests.support.promql import selectors, series_of
from tools import grafana_dashboard, metrics_page

ALERTS = ROOT / "deploy" / "observability" / "alerts.yaml"


def test_the_page_of_metrics_is_that_of_this_code() -> None:
    assert metrics_page.OUT.read_text() == metrics_page.page(), "run python tools/metrics_page.py"


def test_the_dashboard_is_that_of_its_table() -> None:
    assert grafana_dashboard.OUT.read_text() == grafana_dashboard.text(), (
        "run python tools/grafana_dashboard.py"
    )


@cache
def shown() -> set[str]:
    names = re.findall(r"^\| `(\w+)`", metrics_page.page(), re.MULTILINE)
    return {f"{each}{part}" for each in names for part in ("", "_bucket", "_sum", "_count")}


@cache
def expressions() -> dict[str, str]:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    for panel in json.loads(grafana_dashboard.text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$namespace", ".*")
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


@pytest.mark.parametrize("name", expressions())
def test_an_expression_asks_for_metrics_that_there_are(name: str) -> None:
    promql_parser.parse(expressions()[name])
    asked = selectors(expressions()[name])
    assert asked
    for selector in asked:
        assert selector.name in shown() or selector.name.startswith("dynamo_frontend_"), str(selector)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_takes_the_alerts() -> None:
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, capture_output=True)


def test_series_of_a_page_are_read_with_their_labels() -> None:
    page = '# TYPE a_total counter\na_total{b="c"} 3\n# TYPE bare counter\nbare 4\n'
    assert series_of(page) == [("a_total", {"b": "c"}, 3), ("bare", {}, 4)]
