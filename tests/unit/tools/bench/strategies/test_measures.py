"""Properties of percentiles, goodput and the Pareto front, over whatever requests a run may leave."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tools.bench.strategies.synthetic import CHAT
from trtllm_disagg.tools.bench.strategies.measures import (
    MeasuredPoint,
    ParetoPoint,
    Slo,
    front_area,
    pareto_front,
    sent_share,
)
from trtllm_disagg.tools.bench.strategies.records import Arm, Parts, Point, PointResult, RequestRecord

_TIMES = st.floats(0.1, 10_000)
_PLACES = st.lists(st.tuples(st.floats(0.1, 500), st.floats(0.1, 5000)), max_size=12)
SLO = Slo(ttft=500, tpot=30)


@st.composite
def _requests(draw: st.DrawFn) -> RequestRecord:
    return RequestRecord(
        arrival_s=draw(st.floats(0, 100)),
        input_tokens=draw(st.integers(1, 10_000)),
        output_tokens=draw(st.integers(0, 5000)),
        latency_ms=draw(_TIMES),
        ttft_ms=draw(st.none() | _TIMES),
        tpot_ms=draw(st.none() | _TIMES),
        error=draw(st.none() | st.just("503")),
    )


def measured_of(*requests: RequestRecord, rate: float = 1.0, gpus: int = 2) -> MeasuredPoint:
    ends = [request.arrival_s + request.latency_ms / 1000 for request in requests]
    arm = Arm("1P1D", "decode_first", gpus=gpus)
    point = Point(arm.name, CHAT.name, rate)
    return MeasuredPoint(PointResult(point, requests, duration_s=max(ends, default=1.0)), arm)


every_point = st.lists(_requests(), min_size=1, max_size=12).map(lambda requests: measured_of(*requests))


@given(_PLACES)
def test_no_point_dominates_one_of_the_pareto_front(places: list[ParetoPoint]) -> None:
    front = pareto_front(places)
    for x, y in front:
        assert not any(a >= x and b >= y and (a, b) != (x, y) for a, b in places)


@given(_PLACES)
def test_every_point_is_on_or_below_the_pareto_front(places: list[ParetoPoint]) -> None:
    front = pareto_front(places)
    assert all(any(x >= a and y >= b for x, y in front) for a, b in places)


@given(_PLACES, st.tuples(st.floats(0.1, 500), st.floats(0.1, 5000)))
def test_front_area_does_not_shrink_with_another_point(places: list[ParetoPoint], more: ParetoPoint) -> None:
    before, after = front_area(places), front_area([*places, more])
    assert after >= before * (1 - 1e-12)
    assert after >= more[0] * more[1] * (1 - 1e-12)


def test_front_area_is_that_below_the_points() -> None:
    assert front_area([(10, 100), (20, 50), (5, 50)]) == 10 * 100 + 10 * 50
    assert front_area([]) == 0
    assert front_area([(math.nan, 100), (10, math.nan)]) == 0


@given(every_point, st.floats(1, 10_000), st.floats(0.1, 1000))
def test_goodput_is_at_most_what_arrived_and_grows_with_a_looser_slo(
    measured: MeasuredPoint, ttft: float, tpot: float
) -> None:
    if not measured.arrivals_s:
        return
    tight, loose = measured.goodput(Slo(ttft, tpot)), measured.goodput(Slo(2 * ttft, tpot))
    arrived = len(measured.result.requests) / measured.arrivals_s
    assert 0 <= tight.share <= loose.share <= 1
    assert 0 <= tight.requests_s <= loose.requests_s <= arrived * (1 + 1e-12)
    assert 0 <= tight.tokens_s_gpu <= loose.tokens_s_gpu
    assert loose.share <= 1 - measured.errors / len(measured.result.requests) + 1e-12


@given(every_point, st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys_of_the_answers_that_have_such_a_time(
    measured: MeasuredPoint, percent: float
) -> None:
    known = [request.ttft_ms for request in measured.result.answered if request.ttft_ms is not None]
    percentile = measured.percentile("ttft", percent)
    if known:
        assert percentile == pytest.approx(float(np.percentile(known, percent)))
    else:
        assert math.isnan(percentile)


def request_of(arrival: float, ttft: float, tpot: float | None, error: str | None = None) -> RequestRecord:
    return RequestRecord(arrival, 100, 10, ttft + 9 * (tpot or 0), ttft, tpot, error=error)


def test_goodput_counts_answers_that_keep_every_limit() -> None:
    measured = measured_of(
        request_of(0, 100, 20), request_of(1, 900, 20), request_of(2, 100, 50), request_of(3, 100, 20, "503")
    )
    good = measured.goodput(SLO)
    # Four requests, one a second.
    assert (good.share, good.requests_s, good.tokens_s_gpu) == (0.25, 0.25, 0.25 * 10 / 2)


def test_goodput_is_at_most_what_the_load_generator_sent() -> None:
    measured = measured_of(*(request_of(at, 100, 20) for at in range(4)), rate=8.0)
    late, jitter = (
        replace(measured, result=replace(measured.result, sent_share=share)) for share in (0.25, 0.96)
    )
    good = late.goodput(SLO)
    assert (good.share, good.requests_s, good.tokens_s_gpu) == (1, 2, 2 * 10 / 2)
    assert (jitter.is_offered, late.is_offered) == (True, False)
    assert jitter.goodput(SLO) == measured.goodput(SLO)


@pytest.mark.parametrize(
    ("sent", "share"),
    [((5, 6, 7), 1), ((5, 7, 9), 0.5), ((5, 5.5, 6), 1), ((5, 5, 5), 1)],
)
def test_share_of_the_rate_that_was_sent_follows_from_the_first_and_the_last_request(
    sent: tuple[float, ...], share: float
) -> None:
    assert sent_share((0, 1, 2), sent) == share


def test_requests_that_are_planned_for_one_moment_are_sent_at_their_rate() -> None:
    assert sent_share((0, 0, 0), (0, 1, 2)) == 1


def test_an_answer_of_one_token_keeps_every_tpot() -> None:
    assert measured_of(request_of(0, 100, None)).goodput(SLO).share == 1


def test_an_answer_without_a_token_keeps_no_ttft() -> None:
    silent = RequestRecord(0, 100, 0, 50.0)
    assert measured_of(silent).goodput(SLO).share == 0


def test_a_failed_request_has_no_times() -> None:
    measured = measured_of(request_of(0, 100, 20), request_of(1, 1, 1, "503"))
    assert (measured.percentile("ttft", 0), measured.errors) == (100, 1)


def test_mean_parts_are_of_answers_with_parts_only() -> None:
    told = [RequestRecord(i, 1, 1, 9.0, 9.0, parts=Parts(queue=queue)) for i, queue in enumerate((2.0, 4.0))]
    untold = RequestRecord(3, 1, 1, 9.0, 9.0)
    assert measured_of(*told, untold).mean_parts["queue"] == 3
    assert measured_of(untold).mean_parts == {}


def test_lost_to_software_counts_only_answers_that_modelled_times_had_in_time() -> None:
    parts = Parts(prefill=400, transfer=90, decode=180)
    in_time, late, late_anyway = (
        RequestRecord(i, 1, 10, 900.0, ttft, 30.0, parts=replace(parts, queue=queue))
        for i, (ttft, queue) in enumerate(((450.0, 0.0), (520.0, 0.0), (700.0, 200.0)))
    )
    untold = replace(in_time, parts=None)
    measured = measured_of(in_time, late, late_anyway, untold)
    assert measured.lost_to_software(SLO, "ttft") == pytest.approx(1 / 3)
    assert measured.lost_to_software(SLO, "tpot") == 0
    assert measured.lost_to_software(Slo(ttft=550), "ttft") == 0
    # 270 ms after the first token, of which 9 gaps: modelled 30 ms each, measured 31.
    slower = measured_of(replace(in_time, tpot_ms=31.0))
    assert (slower.lost_to_software(SLO, "tpot"), slower.lost_to_software(SLO, "ttft")) == (1, 0)


def test_tokens_a_gpu_are_over_all_gpus_and_the_whole_run() -> None:
    measured = measured_of(request_of(0, 1000, 0.0), request_of(1, 1000, 0.0), gpus=4)
    assert measured.tokens_s_gpu == 20 / 2 / 4
