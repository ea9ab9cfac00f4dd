"""Where the prefill runs: at each threshold, one below it and one above it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.handling import ORDERS, collect, request, tokens_of
from tests.support.recording_pair import make_pair
from trtllm_disagg.config.thresholds import FALLBACK_BUDGET, Live, Thresholds
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.handlers.attempts import Decider, FactSources, create_decider
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.types import GenerateRequest

pytestmark = pytest.mark.usefixtures("no_leaks")

BLOCK = 4
SHORT, LONG = (False, "short"), (True, "long")
OF_QUEUE = {"max_local_prefill_length": 10, "max_prefill_queue_size": 2}


def thresholds(**values: Any) -> Thresholds:
    return Thresholds.of(WorkerConfig(model="m", role=Role.DECODE)).changed(values, "test")


def decider(name: str, depth: int = 0, cached: CachedPrefixes | None = None, **values: Any) -> Decider:
    known = FactSources(Role.DECODE, cached or CachedPrefixes(BLOCK), lambda: depth)
    return create_decider(name, known, Live(thresholds(**values)))


def prompt(count: int) -> GenerateRequest:
    return request(token_ids=list(range(1, count + 1)))


def holding(count: int, salt: str | None = None) -> CachedPrefixes:
    """The start of `prompt`."""
    cached = CachedPrefixes(BLOCK)
    hashes = list(range(count // BLOCK))
    tokens = list(range(1, len(hashes) * BLOCK + 1))
    cached.of_rank(0).publish_stored(tokens, [BLOCK] * len(hashes), hashes, None, cache_salt=salt)
    return cached


@pytest.mark.parametrize(
    ("name", "values", "depth", "length", "decision"),
    [
        ("always", {}, 0, 1, (True, "always")),
        *(
            (name, {"max_local_prefill_length": 100}, 0, length, decision)
            for name in ("length", "length_and_queue")
            for length, decision in ((99, SHORT), (100, SHORT), (101, LONG))
        ),
        ("length_and_queue", OF_QUEUE, 1, 11, LONG),
        ("length_and_queue", OF_QUEUE, 2, 11, (False, "queue_full")),
        ("length_and_queue", OF_QUEUE, 3, 11, (False, "queue_full")),
        ("length_and_queue", OF_QUEUE, 3, 10, SHORT),
        ("non_cached_tokens", {"non_cached_tokens": 8}, 0, 7, (False, None)),
        ("non_cached_tokens", {"non_cached_tokens": 8}, 0, 8, (True, None)),
        ("non_cached_tokens", {"non_cached_tokens": 0}, 0, 5000, (False, None)),
    ],
)
def test_where_a_prompt_runs_at_each_threshold(
    name: str, values: dict[str, Any], depth: int, length: int, decision: tuple[bool, str | None]
) -> None:
    both_stages, reason = decider(name, depth, **values)(prompt(length))
    assert (both_stages, decision[1] and reason) == decision


@pytest.mark.parametrize(("uncached", "reason"), [(39, "cached"), (40, "long"), (41, "long")])
def test_isl_bounding_at_the_token_threshold_goes_remote(uncached: int, reason: str) -> None:
    rule = decider("isl_bounding", cached=holding(1000), eff_isl_threshold=40)
    assert rule(prompt(1000 + uncached)).reason == reason


@pytest.mark.parametrize(("cached", "reason"), [(48, "cached"), (44, "low_hit_ratio"), (52, "cached")])
def test_isl_bounding_with_a_low_hit_ratio_goes_remote(cached: int, reason: str) -> None:
    """A hundred tokens, of which 48, 44 and 52 are there: 0.52, 0.56 and 0.48 are to compute."""
    rule = decider("isl_bounding", cached=holding(cached), eff_isl_ratio_threshold=0.53)
    assert rule(prompt(100)).reason == reason


@pytest.mark.parametrize("percent", range(4, 97, 4))
def test_isl_bounding_at_the_ratio_goes_remote(percent: int) -> None:
    """0.56 * 100 is 56.00000000000001."""
    rule = decider("isl_bounding", cached=holding(100 - percent), eff_isl_ratio_threshold=percent / 100)
    assert rule(prompt(100)).reason == "low_hit_ratio"


@pytest.mark.parametrize(
    ("cached", "num_cached"),
    [*((holding(count), count) for count in (0, 88, 92, 100)), (holding(96, salt="other"), 0)],
)
def test_cached_tokens_of_the_same_salt_do_not_count(cached: CachedPrefixes, num_cached: int) -> None:
    rule, asked = decider("length", cached=cached, max_local_prefill_length=10), prompt(100)
    assert rule(asked).both_stages is (num_cached < 90)
    assert asked.trace.facts == {"uncached": max(1, 100 - num_cached), "queue_depth": 0}


# -- in a worker


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("length", "strategy", "reason"), [(8, "local", "short"), (9, "order", "long")])
async def test_decider_decides_where_a_request_of_each_length_runs(
    order: str, length: int, strategy: str, reason: str
) -> None:
    pair = make_pair(order, prefill_decider="length", thresholds={"max_local_prefill_length": 8})
    asked = request(token_ids=[11, 12, 13, *range(length - 3)])
    chunks = await collect(pair.generate, asked)
    assert len(tokens_of(chunks)) == 5
    both = strategy == "order"
    assert (asked.trace.strategy, asked.trace.reason) == (order if both else "local", reason)
    kinds = [r.request_type for r in (*pair.prefill.results, *pair.decode.results)]
    assert kinds == (["context_only", "generation_only"] if both else ["context_and_generation"])


# -- thresholds change


def live_state(**settings: Any) -> LiveState:
    return LiveState.of(WorkerConfig(model="m", role=Role.DECODE, **settings), BLOCK)


def test_a_change_is_seen_by_the_next_decision_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    live = live_state()
    rule = create_decider("length", FactSources(Role.DECODE, live.cached, lambda: 0), live.thresholds)
    assert not rule(prompt(500)).both_stages
    changes = live.set_thresholds({"max_local_prefill_length": 499}, "set")
    assert changes == ["max_local_prefill_length: 1000 -> 499"]
    assert rule(prompt(500)).both_stages
    assert "thresholds changed by set: max_local_prefill_length: 1000 -> 499" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_length": 1}, "'max_length' .*max_local_prefill_length, "),
        ({"max_local_prefill_length": -1}, "max_local_prefill_length: -1"),
        ({"eff_isl_ratio_threshold": "much"}, "eff_isl_ratio_threshold: 'much'"),
        ({"eff_isl_ratio_threshold": 1.5}, "eff_isl_ratio_threshold: 1.5"),
        ({"max_prefill_queue_size": 1, "max_local_prefill_length": None}, "max_local_prefill_length: None"),
        ({"max_queued_tokens": None}, "max_queued_tokens: None"),
    ],
)
def test_invalid_threshold_change_is_refused_and_changes_nothing(
    values: dict[str, Any], message: str
) -> None:
    live = live_state()
    before = live.thresholds.value
    with pytest.raises(ConfigError, match=f"set: {message}"):
        live.set_thresholds(values, "set")
    assert live.thresholds.value == before


@pytest.mark.parametrize("name", FALLBACK_BUDGET)
def test_a_fallback_budget_is_refused_where_no_request_is_served_alone(name: str) -> None:
    live = live_state(on_missing_stage="fail")
    message = f"set: {name}: 4 is not allowed; expected 0 with --on-missing-stage fail"
    with pytest.raises(ConfigError, match=message):
        live.set_thresholds({name: 4}, "set")
    assert live.set_thresholds({name: 0}, "set") == []
    assert live_state().set_thresholds({name: 4}, "set") == [f"{name}: 0 -> 4"]


@pytest.mark.parametrize(("role", "strategy"), [("agg", "decode_first"), ("decode", "router")])
def test_a_worker_that_calls_no_other_has_the_thresholds_of_its_queue_only(role: str, strategy: str) -> None:
    live = LiveState.of(WorkerConfig(model="m", role=Role(role), strategy=strategy), 4)
    live.set_thresholds({"max_queued_requests": 7}, "set")
    assert live.thresholds.value["max_queued_requests"] == 7
    with pytest.raises(ConfigError, match=r"set: max_local_prefill_length: 7 .* calls another"):
        live.set_thresholds({"max_local_prefill_length": 7}, "set")


@pytest.mark.parametrize("strategy", ["router", None])
@pytest.mark.parametrize("setting", [{"prefill_decider": "length"}, {"max_tries": 3}, {"next_router": "kv"}])
def test_a_worker_that_calls_no_other_refuses_the_setting(
    strategy: str | None, setting: dict[str, Any]
) -> None:
    where: dict[str, Any] = {"role": Role.DECODE, "strategy": strategy} if strategy else {"role": Role.AGG}
    with pytest.raises(ConfigError, match="where no worker calls another"):
        WorkerConfig(model="m", **where, **setting)


def test_an_unknown_decider_is_named_with_the_others() -> None:
    with pytest.raises(ConfigError, match=r"'long' .*always, length, length_and_queue"):
        WorkerConfig(model="m", role=Role.DECODE, prefill_decider="long")
