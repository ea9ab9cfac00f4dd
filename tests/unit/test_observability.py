"""The page of metrics, the dashboard and the alerts are those of this code, and Prometheus can read them."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from scripts import metrics_page
from tests.support.deployments import ROOT
from tests.support.promql import ALERTS, expressions, selectors


def test_metrics_page_is_up_to_date() -> None:
    assert metrics_page.OUT.read_text() == metrics_page.page(), "run python -m scripts.metrics_page"


def test_requests_by_role_are_those_of_clients_and_no_messages_between_workers() -> None:
    """Dynamo counts every call of an endpoint: descriptions and notices too, one for each prefill of decode_first."""
    (asked,) = selectors(expressions()["Requests by role A"])
    assert asked.name == "trtllm_disagg_request_seconds_count"


@cache
def shown() -> set[str]:
    rows = re.findall(r"^\| (.+?) \| (?:counter|gauge|histogram) \|", metrics_page.page(), re.MULTILINE)
    names = re.findall(r"\w+", " ".join(rows))
    return {f"{each}{part}" for each in names for part in ("", "_bucket", "_sum", "_count")}


@pytest.mark.parametrize("name", expressions())
def test_every_alert_and_panel_expression_uses_existing_metrics(name: str) -> None:
    promql_parser.parse(expressions()[name])
    asked = selectors(expressions()[name])
    assert asked
    for selector in asked:
        assert selector.name in shown() or selector.name.startswith("dynamo_frontend_"), str(selector)


#: Of each series a value every 15 s, for 20 minutes: while the alert has no reason, and in the fault that it is for.
_MINUTES, _SAMPLES = 20, 80
_STEADY = f"0+1x{_SAMPLES}"
_WHOLE = 'trtllm_disagg_request_seconds_count{phase="whole"}'
_BY_TENTHS = f"0+10x{_SAMPLES}"
FAULTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "TrtllmDisaggFallbacks": (
        {'trtllm_disagg_fallbacks_total{to="other_instance"}': _STEADY, _WHOLE: f"0+100x{_SAMPLES}"},
        {'trtllm_disagg_fallbacks_total{to="other_instance"}': _STEADY, _WHOLE: _BY_TENTHS},
    ),
    "TrtllmDisaggServesAlone": (
        {'trtllm_disagg_fallbacks_total{to="local"}': f"7x{_SAMPLES}", _WHOLE: f"0+100x{_SAMPLES}"},
        {'trtllm_disagg_fallbacks_total{to="local"}': _STEADY, _WHOLE: f"0+100x{_SAMPLES}"},
    ),
    "TrtllmDisaggBreakerOpen": (
        # 32 requests failed at once, and then it was well; it fails once in two minutes.
        {"trtllm_disagg_breakers_opened_total": f"0x64 32x{_SAMPLES - 65}"},
        {"trtllm_disagg_breakers_opened_total": " ".join(str(each // 8) for each in range(_SAMPLES))},
    ),
    "TrtllmDisaggHandoffStuck": (
        {"trtllm_disagg_handoffs_oldest_seconds": "0 15 0 15 30 45 60 " * 12},
        {"trtllm_disagg_handoffs_oldest_seconds": f"55x{_SAMPLES}"},
    ),
    "TrtllmDisaggKvPoolFull": (
        {"dynamo_component_gpu_cache_usage_percent": "1 1 0.9 " * 27},
        {"dynamo_component_gpu_cache_usage_percent": f"1x{_SAMPLES}"},
    ),
    "TrtllmDisaggSlowTransfers": (
        {
            'trtllm_disagg_kv_transfer_seconds_bucket{le="1"}': _BY_TENTHS,
            'trtllm_disagg_kv_transfer_seconds_bucket{le="+Inf"}': _BY_TENTHS,
        },
        {
            'trtllm_disagg_kv_transfer_seconds_bucket{le="1"}': f"0+9x{_SAMPLES}",
            'trtllm_disagg_kv_transfer_seconds_bucket{le="2"}': _BY_TENTHS,
            'trtllm_disagg_kv_transfer_seconds_bucket{le="+Inf"}': _BY_TENTHS,
        },
    ),
    "TrtllmDisaggSlowFirstTokens": (
        {
            'trtllm_disagg_first_chunk_seconds_bucket{phase="whole",le="10"}': _BY_TENTHS,
            'trtllm_disagg_first_chunk_seconds_bucket{phase="whole",le="+Inf"}': _BY_TENTHS,
        },
        {
            'trtllm_disagg_first_chunk_seconds_bucket{phase="whole",le="10"}': f"0+9x{_SAMPLES}",
            'trtllm_disagg_first_chunk_seconds_bucket{phase="whole",le="30"}': _BY_TENTHS,
            'trtllm_disagg_first_chunk_seconds_bucket{phase="whole",le="+Inf"}': _BY_TENTHS,
        },
    ),
    "TrtllmDisaggShedding": (
        {"trtllm_disagg_requests_shed_total": f"5x{_SAMPLES}"},
        {"trtllm_disagg_requests_shed_total": _STEADY},
    ),
    "TrtllmDisaggKvEventsLost": (
        {"trtllm_kv_event_id_gap_events_total": f"2x{_SAMPLES}"},
        {"trtllm_kv_event_id_gap_events_total": f"2x60 3x{_SAMPLES - 61}"},
    ),
    "TrtllmDisaggPrefillQueueOld": (
        {"trtllm_disagg_prefill_queue_age_seconds": "2 12 " * 40},
        {"trtllm_disagg_prefill_queue_age_seconds": f"12x{_SAMPLES}"},
    ),
    "TrtllmDisaggModelledLate": (
        {
            "trtllm_disagg_modelled_late_seconds_total": f"0+0.5x{_SAMPLES}",
            "trtllm_disagg_modelled_step_seconds_total": _BY_TENTHS,
        },
        {
            "trtllm_disagg_modelled_late_seconds_total": f"0+2x{_SAMPLES}",
            "trtllm_disagg_modelled_step_seconds_total": _BY_TENTHS,
        },
    ),
}

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed"
)


def test_each_alert_has_a_fault_with_its_metrics() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert list(FAULTS) == [rule["alert"] for rule in rules], (
        f"FAULTS lists the alerts of {ALERTS.name}, in order"
    )
    for rule in rules:
        told = {re.sub(r"\{.*", "", series) for series in FAULTS[rule["alert"]][1]}
        assert told >= {selector.name for selector in selectors(rule["expr"])}


def test_each_alert_has_a_section_that_says_what_to_do() -> None:
    page = ROOT / "docs" / "how-to" / "alerts.md"
    assert re.findall(r"^## (Trtllm\w+)$", page.read_text(), re.MULTILINE) == list(FAULTS), page


@promtool
@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_fires_in_its_fault_alone(alert: str, tmp_path: Path) -> None:
    def case(series: dict[str, str], firing: list[str]) -> dict[str, Any]:
        samples = [{"labels": f'{{alertname="{each}"}}', "value": 1} for each in firing]
        expected = {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{_MINUTES}m",
            "exp_samples": samples,
        }
        given = [{"series": name, "values": values} for name, values in series.items()]
        return {"interval": "15s", "input_series": given, "promql_expr_test": [expected]}

    well, fault = FAULTS[alert]
    tests = [case(well, []), case(fault, [alert])]
    file = tmp_path / "tests.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "15s", "tests": tests})
    )
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
