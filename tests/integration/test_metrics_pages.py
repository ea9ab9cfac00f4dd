"""Dynamo's dashboards, its Planner, and our dashboard and alerts find on live pages what they ask for."""

from __future__ import annotations

import random

import pytest

from tests.support.deployments import FIXED, MODEL_NAME, Served
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
def test_our_dashboard_and_alerts_find_what_they_ask_for(strategy: str, deployed: Served) -> None:
    series = everything(pages_of(deployed))
    asked = [(name, each) for name, query in expressions().items() for each in selectors(query)]
    assert len(asked) > 30
    lacking = [
        f"{name}: {selector}"
        for name, selector in asked
        if selector.name not in ELSEWHERE and not any(asks_for(selector, each) for each in series)
    ]
    assert lacking == []


@every_order
def test_no_series_is_on_a_page_twice(strategy: str, deployed: Served) -> None:
    pages_of(deployed)
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
