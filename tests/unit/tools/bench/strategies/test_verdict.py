"""What is said of runs with a right verdict that is known by construction, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.tools.bench.strategies.synthetic import (
    BAND,
    CLEAN,
    RATES,
    Behaviour,
    plan_of,
    results_of,
    sweep_of,
    sweep_of_results,
    with_error,
    with_software,
)
from trtllm_disagg.tools.bench.strategies.advice import advise
from trtllm_disagg.tools.bench.strategies.measures import Slo
from trtllm_disagg.tools.bench.strategies.records import NOMINAL, Parts, Point, PointResult, Sensitivity
from trtllm_disagg.tools.bench.strategies.sweep import Sweep, sweeps_of
from trtllm_disagg.tools.bench.strategies.verdict import Verdict, goodput, judge, latency_at, pareto_area

SLO = Slo(ttft=500, tpot=30)
AGG, ORDER = "2 agg", "1P1D decode_first"
CLEAR = {
    AGG: Behaviour(6, noise=0.02),
    ORDER: Behaviour(12, noise=0.02, strategy="decode_first"),
}


def verdict_of(sweep: Sweep) -> Verdict:
    return judge(sweep, goodput(SLO))


def verdict_with(change: Callable[[PointResult], PointResult]) -> Verdict:
    """Of the clear case, its results changed."""
    plan = plan_of(CLEAR)
    return verdict_of(sweep_of_results(plan, map(change, results_of(plan, CLEAR))))


def test_a_clear_lead_is_stated_with_its_size() -> None:
    verdict = verdict_of(sweep_of(CLEAR))
    assert (verdict.winner, verdict.why_not) == (ORDER, "")
    (lead,) = verdict.leads
    assert lead.other == AGG
    assert lead.factor == pytest.approx(2, rel=0.05)
    assert set(verdict.scores[ORDER]) == set(BAND)
    assert len(verdict.scores[ORDER][NOMINAL].values) == 3


def test_arms_within_5_percent_are_a_tie() -> None:
    alike = {AGG: Behaviour(12.2, noise=0.02), ORDER: CLEAR[ORDER]}
    verdict = verdict_of(sweep_of(alike))
    assert verdict.winner is None
    assert "differ by less than 5%" in verdict.why_not
    assert verdict.is_tie
    assert not verdict_of(sweep_of(CLEAR)).is_tie


def test_tie_is_reported_although_the_band_lacks_higher_rates() -> None:
    plan = plan_of({AGG: CLEAR[ORDER], ORDER: CLEAR[ORDER]})
    few = [r for r in results_of(plan, {AGG: CLEAR[ORDER], ORDER: CLEAR[ORDER]}) if is_seen(r.point)]
    verdict = verdict_of(sweep_of_results(plan, few))
    assert verdict.is_tie


def is_seen(point: Point) -> bool:
    """With faster steps, at low rates only."""
    factors = point.sensitivity
    return point.rate <= 4 or min(factors.prefill_factor, factors.decode_factor) >= 1


def test_arm_below_a_tie_of_the_best_two_is_beaten() -> None:
    verdict = verdict_of(sweep_of({**CLEAR, "1P1D prefill_first": CLEAR[ORDER]}))
    assert verdict.winner is None
    assert [lead.other for lead in verdict.beaten] == [AGG]
    assert len(verdict.doubtful) == 1
    assert verdict.is_tie


def test_a_winner_that_the_band_overturns_is_not_stated() -> None:
    """Faster decode steps help the arm that only decodes, by more than its lag."""
    behaviours = {
        AGG: Behaviour(10, prefill_share=0.0),
        ORDER: Behaviour(12, prefill_share=1.0, strategy="decode_first"),
    }
    verdict = verdict_of(sweep_of(behaviours))
    assert (verdict.best, verdict.winner) == (ORDER, None)
    assert "the band overturns it: with decode steps x0.5 2 agg is" in verdict.why_not
    untouched = verdict_of(sweep_of({name: replace(b, prefill_share=0.5) for name, b in behaviours.items()}))
    assert untouched.winner == ORDER


def test_a_lead_within_the_spread_of_repetitions_is_not_stated() -> None:
    """One falls by 40 % a repetition, the other stays: the median leads, the repetitions do not."""
    verdict = verdict_of(sweep_of({AGG: Behaviour(9), ORDER: Behaviour(17, noise=0.4)}))
    assert verdict.winner is None
    assert "repetitions differ by more than" in verdict.why_not


def test_points_measured_once_need_a_larger_lead() -> None:
    closer = {AGG: Behaviour(11.1), ORDER: Behaviour(12)}
    assert verdict_of(sweep_of(closer, repetitions=2)).winner == ORDER
    once = verdict_of(sweep_of(closer, repetitions=1))
    assert once.winner is None
    assert "each measured once" in once.why_not


def test_rates_that_the_load_generator_did_not_send_are_left_out_with_what_it_sent() -> None:
    def slow(result: PointResult) -> PointResult:
        share = 0.94 if result.point.arm == AGG and result.point.rate >= 8 else 0.95
        return replace(result, sent_share=share)

    plan = plan_of(CLEAR)
    sweep = sweep_of_results(plan, map(slow, results_of(plan, CLEAR)))
    verdict = verdict_of(sweep)
    assert verdict.winner is None
    said = f"from 8 requests/s on: the load generator sent only 7.52 requests/s in {AGG}"
    assert str(verdict.left_out[0]) == said
    assert "--time-scale" in verdict.left_out[0].remedy
    assert (sweep.knee(AGG, SLO), sweep.knee(ORDER, SLO)) == (4, 8)
    unsent = [replace(result, sent_share=0.5) for result in results_of(plan, CLEAR)]
    assert sweep_of_results(plan, unsent).knee(ORDER, SLO) is None


def test_too_much_software_is_refused() -> None:
    verdict = verdict_with(lambda result: with_software(result, 0.06))
    assert verdict.winner is None
    assert "our own software took 6.0% of latency" in verdict.why_not
    assert verdict_with(lambda result: with_software(result, 0.05)).winner == ORDER


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.0, "took 100% of"), (0.0504, "took 5.0% of"), (0.0524, "took 5.2% of"), (0.19, "took 19% of")],
)
def test_reason_has_the_share_of_software_in_percent(share: float, said: str) -> None:
    assert said in verdict_with(lambda result: with_software(result, share)).why_not


def test_a_share_of_software_that_is_not_known_is_refused() -> None:
    assert "not known" in verdict_with(lambda result: replace(result, software={})).why_not


def test_a_real_deployment_needs_neither_share_nor_band() -> None:
    plan = replace(plan_of(CLEAR, band=[NOMINAL]), is_modelled=False)
    results = [replace(result, software={}) for result in results_of(plan, CLEAR)]
    sweep = sweep_of_results(plan, results)
    assert verdict_of(sweep).winner == ORDER
    assert "measured, not modelled" in advise(sweep, SLO).changes


def test_too_much_software_at_the_highest_rate_leaves_the_lower_ones() -> None:
    verdict = verdict_with(lambda r: with_software(r, 0.2) if r.point.rate == max(RATES) else r)
    assert verdict.winner == ORDER
    assert any("from 32 requests/s on" in str(reason) for reason in verdict.left_out)


def test_software_in_a_time_that_the_measure_does_not_use_is_no_matter() -> None:
    plan = plan_of(CLEAR)
    results = [replace(r, software={**CLEAN, "latency": 0.5}) for r in results_of(plan, CLEAR)]
    sweep = sweep_of_results(plan, results)
    assert not judge(sweep, latency_at(sweep.calm_rates, "ttft", 90)).left_out
    assert judge(sweep, goodput(SLO)).left_out


def beyond_the_gpus(result: PointResult, milliseconds: float) -> PointResult:
    """All first tokens came so much later than GPUs and the link made them."""
    requests = tuple(
        replace(r, ttft_ms=(r.ttft_ms or 0) + milliseconds, latency_ms=r.latency_ms + milliseconds)
        for r in result.requests
    )
    return replace(result, requests=requests, software={**CLEAN, "ttft": 0.3})


def test_software_in_ttft_is_no_matter_for_goodput_while_it_makes_no_answer_late() -> None:
    """In time are those of at most 100 ms; then 300 ms more are within 500 ms, and 450 are not."""
    assert verdict_with(lambda result: beyond_the_gpus(result, 300.0)).winner == ORDER
    late = verdict_with(lambda result: beyond_the_gpus(result, 450.0))
    assert late.winner is None
    assert "our own software took 30% of TTFT" in late.why_not


def test_an_answer_that_software_makes_late_is_no_matter_where_its_share_of_ttft_is_small() -> None:
    def near_the_limit(result: PointResult) -> PointResult:
        late = beyond_the_gpus(result, 450.0)
        return replace(late, software=CLEAN)

    assert not verdict_with(near_the_limit).left_out


def test_software_in_ttft_is_no_matter_where_answers_are_late_by_another_limit_only() -> None:
    def late_by_tpot(result: PointResult) -> PointResult:
        """Each had 29.9 ms by the GPUs, and 31 by what its client saw."""
        requests = tuple(
            replace(r, tpot_ms=31.0, parts=Parts(prefill=r.ttft_ms or 0, decode=29.9 * (r.output_tokens - 1)))
            for r in result.requests
        )
        return replace(result, requests=requests, software={**CLEAN, "ttft": 0.3})

    assert not verdict_with(late_by_tpot).left_out


def test_ttft_itself_is_not_concluded_from_where_software_took_much_of_it() -> None:
    plan = plan_of(CLEAR)
    sweep = sweep_of_results(plan, [beyond_the_gpus(r, 300.0) for r in results_of(plan, CLEAR)])
    verdict = judge(sweep, latency_at(sweep.calm_rates, "ttft", 90))
    assert "our own software took 30% of TTFT" in verdict.why_not


def test_failed_requests_are_refused() -> None:
    verdict = verdict_with(lambda result: with_error(result) if result.point.arm == AGG else result)
    assert verdict.winner is None
    assert "1 of 100 requests failed in 2 agg" in verdict.why_not


def test_where_the_other_arm_could_take_more_nothing_is_stated() -> None:
    """The rate at which it would break was left out, so its end is not known."""
    verdict = verdict_with(lambda result: with_error(result) if result.point.rate >= 8 else result)
    assert verdict.winner is None


def test_arms_of_other_numbers_of_gpus_are_not_compared() -> None:
    unequal = {AGG: Behaviour(6, gpus=2), ORDER: Behaviour(12, gpus=4), "4 agg": Behaviour(30, gpus=4)}
    plan = plan_of(unequal)
    two, four = sweeps_of(plan, results_of(plan, unequal))
    assert (two.name, four.name) == ("chat on 2 GPUs", "chat on 4 GPUs")
    refused = verdict_of(two)
    assert refused.winner is None
    assert (
        refused.why_not == "no other arm was measured on as many GPUs: 1P1D decode_first has 4, 4 agg has 4"
    )
    assert verdict_of(four).winner == "4 agg"


def test_a_missing_side_of_the_band_is_refused() -> None:
    band = [NOMINAL, Sensitivity(0.5), Sensitivity(1.5), Sensitivity(1, 0.5)]
    assert "decode slower (not measured for every arm)" in verdict_of(sweep_of(CLEAR, band=band)).why_not


def test_verdict_with_one_arm_is_not_decided() -> None:
    assert verdict_of(sweep_of({AGG: Behaviour(6)})).why_not == "no other arm was measured on as many GPUs"


def test_verdict_names_an_slo_that_no_arm_keeps() -> None:
    verdict = judge(sweep_of(CLEAR), goodput(Slo(ttft=1)))
    assert "no arm keeps it" in verdict.why_not


def test_an_arm_that_never_keeps_the_slo_is_beaten_without_a_number() -> None:
    slow = {AGG: Behaviour(6, tpot=40), ORDER: CLEAR[ORDER]}
    advice = advise(sweep_of(slow), SLO)
    assert advice.verdict.winner == ORDER
    assert "inf" not in advice.paragraph


def test_arms_are_compared_at_rates_of_all_and_at_those_beyond_what_exhausted_the_others() -> None:
    plan, measure = plan_of(CLEAR), goodput(SLO)
    kept = [r for r in results_of(plan, CLEAR) if r.point.arm == ORDER or r.point.rate <= 16]
    sweep = sweep_of_results(plan, kept)
    assert list(sweep.compared(AGG, NOMINAL, measure.is_exhausted)[0]) == [1, 2, 4, 8, 16]
    assert list(sweep.compared(ORDER, NOMINAL, measure.is_exhausted)[0]) == list(RATES)
    assert verdict_of(sweep).winner == ORDER
    cut = sweep_of_results(plan, [r for r in kept if r.point.arm == ORDER or r.point.rate <= 4])
    assert list(cut.compared(ORDER, NOMINAL, measure.is_exhausted)[0]) == [1, 2, 4]
    assert verdict_of(cut).winner is None


def test_a_variant_that_the_rates_do_not_exhaust_proves_nothing() -> None:
    """Half the steps, twice the capacity: at the highest rate both are in time."""
    behaviours = {AGG: Behaviour(6, prefill_share=0.9), ORDER: Behaviour(12, prefill_share=0.9)}
    why_not = verdict_of(sweep_of(behaviours, rates=(1, 2, 4, 8))).why_not
    assert why_not == (
        "2 agg could take more than 8 requests/s, the highest rate compared with prefill steps x0.5"
    )


@pytest.mark.parametrize(
    ("requests", "remedy"),
    [(10, "give --requests 34: with 10 all have come before GPUs are full"), (200, "give --rates")],
)
def test_of_too_few_requests_to_fill_the_gpus_more_decide_it_and_of_enough_a_higher_rate(
    requests: int, remedy: str
) -> None:
    behaviours = {AGG: Behaviour(6, prefill_share=0.9), ORDER: Behaviour(12, prefill_share=0.9)}
    plan = plan_of(behaviours, rates=(1, 2, 4, 8))
    few = [replace(each, requests=each.requests[:requests]) for each in results_of(plan, behaviours)]
    assert remedy in verdict_of(sweep_of_results(plan, few)).what_next


def test_knee_is_the_last_rate_at_which_nine_in_ten_are_in_time() -> None:
    sweep = sweep_of(CLEAR)
    assert (sweep.knee(AGG, SLO), sweep.knee(ORDER, SLO), sweep.calm_rate) == (4, 8, 4)
    assert sweep.knee(AGG, Slo(ttft=1)) is None


def test_other_measures_have_verdicts_of_their_own() -> None:
    behaviours = {AGG: Behaviour(12, tpot=30), ORDER: Behaviour(6, tpot=10)}
    sweep = sweep_of(behaviours)
    assert verdict_of(sweep).winner == AGG
    assert judge(sweep, latency_at(sweep.calm_rates, "tpot", 90)).winner == ORDER
    assert judge(sweep, pareto_area()).best == ORDER
    assert "differ by less" in judge(sweep, latency_at(sweep.calm_rates, "ttft", 90)).why_not


def test_advice_names_order_workers_decider_numbers_and_what_changes_it() -> None:
    advice = advise(sweep_of(CLEAR), SLO)
    for text in (
        "chat on 2 GPUs: run decode_first with 1 prefill worker and 1 decode worker, decider always",
        "requests/s within TTFT 500 ms and TPOT 30 ms on 2 GPUs",
        "2 agg up to 5.9",
        "At 8 requests/s 2 agg keeps TTFT for 7",
        "more in queue",
        "up to 4 requests/s all arms do alike",
        "not step times of prefill or decode that are 50% shorter or longer: the lead is",
        "no SLO from a quarter to four times this one",
    ):
        assert text in advice.paragraph


def test_rates_at_which_no_arm_is_in_time_are_no_tie() -> None:
    plan = plan_of(CLEAR)
    results = [
        replace(
            result,
            requests=tuple(replace(each, ttft_ms=9999.0, latency_ms=12000.0) for each in result.requests),
        )
        if result.point.rate == max(RATES)
        else result
        for result in results_of(plan, CLEAR)
    ]
    assert "up to 4 requests/s all arms do alike" in advise(sweep_of_results(plan, results), SLO).paragraph


def test_advice_names_the_nearest_slo_at_which_another_arm_is_better() -> None:
    """Above 30 ms the slower arm counts, and it takes more."""
    behaviours = {AGG: Behaviour(24, tpot=35), ORDER: Behaviour(12, tpot=10, strategy="decode_first")}
    advice = advise(sweep_of(behaviours), SLO)
    assert advice.verdict.winner == ORDER
    assert "with TPOT 37.5 ms 2 agg is better" in advice.changes


def test_advice_names_the_variant_that_takes_the_lead_away() -> None:
    """With half of its prefill time the other arm comes level."""
    behaviours = {
        AGG: Behaviour(10, prefill_share=0.35),
        ORDER: Behaviour(12, prefill_share=0.0, strategy="decode_first"),
    }
    advice = advise(sweep_of(behaviours), SLO)
    assert advice.verdict.winner == ORDER
    assert "with prefill steps x0.5 the lead over 2 agg is gone" in advice.changes


def test_latency_is_compared_in_the_band_at_rates_of_its_own() -> None:
    """With slower steps an arm is asked for less than by the tables."""
    behaviours = {AGG: Behaviour(12, tpot=30), ORDER: Behaviour(12, tpot=10)}
    plan = plan_of(behaviours, repetitions=1)
    moved = [
        replace(
            r, point=replace(r.point, rate=r.point.rate * (1 if r.point.sensitivity == NOMINAL else 0.75))
        )
        for r in results_of(plan, behaviours)
    ]
    sweep = sweep_of_results(plan, moved)
    assert judge(sweep, latency_at(sweep.calm_rates, "tpot", 90)).winner == ORDER


def test_percentiles_without_a_request_above_them_are_not_shown() -> None:
    assert sweep_of(CLEAR).percentiles == (50, 90, 99)
    plan = plan_of(CLEAR)
    few = [replace(result, requests=result.requests[:20]) for result in results_of(plan, CLEAR)]
    assert sweep_of_results(plan, few).percentiles == (50, 90)


def with_share(share: float) -> Sweep:
    plan = plan_of(CLEAR)
    return sweep_of_results(plan, [with_software(result, share) for result in results_of(plan, CLEAR)])


def with_few() -> Sweep:
    plan = plan_of(CLEAR)
    return sweep_of_results(plan, [replace(r, requests=r.requests[:9]) for r in results_of(plan, CLEAR)])


@pytest.mark.parametrize(
    ("sweep", "flag"),
    [
        (sweep_of({AGG: CLEAR[ORDER], ORDER: CLEAR[ORDER]}, repetitions=1), "--repetitions 3"),
        (sweep_of({AGG: CLEAR[ORDER], ORDER: CLEAR[ORDER]}), "do alike"),
        (sweep_of({AGG: Behaviour(9), ORDER: Behaviour(17, noise=0.4)}), "double --requests"),
        (
            sweep_of({AGG: Behaviour(6), ORDER: Behaviour(12)}, rates=(1, 2, 4)),
            "--rates of your own, up to 6",
        ),
        (sweep_of({AGG: Behaviour(100, tpot=90), ORDER: Behaviour(100, tpot=90)}), "looser --slo"),
        (sweep_of({AGG: Behaviour(6)}), "--arms"),
        (sweep_of(CLEAR, band=BAND[:1]), "--band"),
        (sweep_of(CLEAR, band=BAND[:3]), "the same command again"),
        (
            sweep_of({AGG: Behaviour(10, prefill_share=0.0), ORDER: Behaviour(12, prefill_share=1.0)}),
            "modelled.measured",
        ),
        (with_share(0.1), "--time-scale 2.6"),
        (with_few(), "10 --requests at least"),
    ],
    ids=[
        "once",
        "alike",
        "repetitions",
        "rates",
        "slo",
        "arms",
        "band",
        "cut",
        "overturned",
        "software",
        "few",
    ],
)
def test_undecided_advice_names_the_flag_to_give_next(sweep: Sweep, flag: str) -> None:
    advice = advise(sweep, SLO)
    assert "not decided" in advice.headline
    assert flag in advice.changes


def test_what_an_arm_is_good_for_below_the_rates_compared_is_not_made_up() -> None:
    """At the lowest rate, 4, most of its answers are late: it may be good for as much as nearly 4."""
    clear = sweep_of({AGG: Behaviour(2), ORDER: CLEAR[ORDER]}, rates=(4.0, 8.0, 16.0, 32.0))
    advice = advise(clear, SLO)
    assert advice.verdict.winner == ORDER
    assert f"{AGG} less than 4, the lowest rate compared (a lead of at least 19" in advice.because


def test_an_arm_that_may_be_better_below_the_rates_compared_leaves_it_open() -> None:
    open_ = sweep_of({AGG: Behaviour(2), ORDER: Behaviour(4)}, rates=(4.0, 8.0, 16.0))
    verdict = verdict_of(open_)
    assert verdict.winner is None
    assert f"{AGG} may do better below 4 requests/s, the lowest rate compared" in verdict.why_not
    assert "--rates of your own, down to 2" in verdict.what_next
