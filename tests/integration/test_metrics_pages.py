"""What is asked of a deployment that serves, by dashboards, alerts, Planner, doctor and top, finds its answer."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from tests.support.deployments import DISAGGREGATED, FIXED, MODEL_NAME, Fleet, Served
from tests.support.dynamo_dashboards import OF_FRONTEND, OF_ROLE, OF_WORKERS
from tests.support.promql import Series, asks_for, expressions, selected, selectors, series_of

#: Shown where there is a prefill queue, or a modelled engine; their own tests look for them.
ELSEWHERE = {
    "trtllm_disagg_prefill_queue_age_seconds",
    "trtllm_disagg_modelled_late_seconds_total",
    "trtllm_disagg_modelled_step_seconds_total",
}

every_order = pytest.mark.parametrize("strategy", FIXED)

Pages = dict[str, list[Series]]


def pages_of(served: Served) -> Pages:
    """By role, and the frontend's, after a request that was served and has been counted."""
    prompt = random.choices(range(300, 1300), k=200)
    for _ in range(2):
        served.openai.completions.create(
            model=MODEL_NAME, prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True}
        )
    served.wait_until_idle()
    pages: Pages = {"frontend": series_of(served.http.get(f"{served.url}/metrics").raise_for_status().text)}
    for worker in served.workers:
        pages.setdefault(worker.role, []).extend(series_of(worker.page()))
    return pages


def everything(pages: Pages) -> list[Series]:
    return [series for page in pages.values() for series in page]


@every_order
def test_dynamos_dashboards_and_planner_find_what_they_ask_for(strategy: str, deployed: Served) -> None:
    pages = pages_of(deployed)

    def unanswered(asked: list[str], page: list[Series]) -> list[str]:
        named = [each.replace('"M"', f'"{MODEL_NAME}"') for each in asked]
        return [each for each in named if not any(selected(each, page))]

    assert unanswered(OF_FRONTEND, pages.pop("frontend")) == []
    for role, page in pages.items():
        component = "prefill" if role == "prefill" else "backend"
        assert unanswered(OF_WORKERS + OF_ROLE[component], page) == []
        # Both roles have served requests, whichever one the frontend asked.
        (total,) = (each for each in OF_ROLE[component] if "requests_total" in each)
        assert sum(series.value for series in selected(total, page)) >= 2
        other = OF_ROLE["prefill" if component == "backend" else "backend"]
        assert unanswered(other, page) == other


@every_order
def test_our_dashboard_and_alerts_find_what_they_ask_for_and_no_series_is_there_twice(
    strategy: str, deployed: Served
) -> None:
    series = everything(pages_of(deployed))
    asked = [(name, each) for name, query in expressions().items() for each in selectors(query)]
    assert len(asked) > 30
    lacking = [
        f"{name}: {selector}"
        for name, selector in asked
        if selector.name not in ELSEWHERE and not any(asks_for(selector, each) for each in series)
    ]
    assert lacking == []
    for worker in deployed.workers:
        shown = [(each.name, tuple(sorted(each.labels.items()))) for each in series_of(worker.page())]
        assert len(shown) == len(set(shown))


@every_order
def test_the_engines_measurements_of_requests_are_on_its_page(strategy: str, deployed: Served) -> None:
    for role, page in pages_of(deployed).items():
        if role == "frontend":
            continue
        counts = {series.name: series.value for series in page if series.name.startswith("trtllm_")}
        names = ["e2e_request_latency_seconds", "request_prefill_time_seconds"]
        names += ["time_per_output_token_seconds"] if role != "prefill" else []
        for name in names:
            assert counts[f"trtllm_{name}_count"] >= 1, f"{role} has no {name}"
        finished = sum(
            each.value for each in selected('trtllm_request_success_total{finished_reason=~".+"}', page)
        )
        assert finished >= 2


# -- doctor --url and top, asked of deployments that serve


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_a_deployment_that_serves_has_no_errors_and_nothing_unknown(strategy: str, fleet: Fleet) -> None:
    deployed = fleet[strategy]
    command = [sys.executable, "-m", "trtllm_disagg", "doctor", "--url", deployed.url, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(ended.stdout)
    assert (said["model"], said["errors"], said["notes"], said["not_known"]) == (MODEL_NAME, 0, 0, 0)
    value = {row["rule"]: row["value"] for row in said["rows"]}
    assert sorted(value["workers"].split(", ")) == sorted(worker.name for worker in deployed.workers)
    assert value["order"].startswith(f"{strategy} (")
    assert any(f"{worker.instance_id:x}" in value["both stages"] for worker in deployed.workers)
    assert int(value["KV moved"].split()[0].replace(",", "")) > 0
    assert value["KV events"].startswith("the router found ")


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_top_shows_the_order_in_force_and_what_each_worker_did(strategy: str, fleet: Fleet) -> None:
    deployed = fleet[strategy]
    deployed.openai.completions.create(
        model=MODEL_NAME, prompt="What is a list?", max_tokens=8, extra_body={"ignore_eos": True}
    )
    command = [sys.executable, "-m", "trtllm_disagg", "top", "--once", "--json"]
    for where in (["--run-dir", str(deployed.deployment.run_dir)], ["--url", deployed.url]):
        ended = subprocess.run([*command, *where], capture_output=True, text=True, timeout=60)

        assert ended.returncode == 0, ended.stdout + ended.stderr
        said = json.loads(ended.stdout)
        assert (said["strategy"], said["model"], said["url"]) == (strategy, MODEL_NAME, deployed.url)
        assert said["doubt"] == ""
        assert said["frontend"]["ttft_seconds"]["p50"] > 0
        assert said["frontend"]["itl_seconds"]["count"] > 0
        processes = {process["name"]: process for process in said["processes"]}
        assert {process["state"] for process in processes.values()} == {"ready"}
        for worker in deployed.workers:
            load = processes[worker.name]["load"]
            assert load["kv_blocks_total"] > 0
            assert load["prefill_tokens" if worker.role == "prefill" else "decode_tokens"] > 0
            assert None not in (load["batch"], load["queued"], load["handoffs_held"])
