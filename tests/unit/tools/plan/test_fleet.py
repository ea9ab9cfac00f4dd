"""What each order computes and moves, where a prefix is found, and what waits for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.orders import prompts_of
from tests.unit.tools.conftest import MODELLED
from trtllm_disagg.config.deciders import DECIDERS, Length
from trtllm_disagg.engines.recording.result import scripted_token
from trtllm_disagg.tools.plan.fleet import simulate
from trtllm_disagg.tools.plan.layouts import Layout, layouts_of
from trtllm_disagg.tools.plan.simulation import ModelledWorker, SimulatedPoint
from trtllm_disagg.tools.plan.slo import Slo
from trtllm_disagg.tools.plan.workloads import Ask

LAYOUTS = {layout.name: layout for count in (2, 3, 4) for layout in layouts_of(count)}
#: The last token of an answer has no KV: 2048 + 128 tokens fill blocks of 32.
PROMPT, ANSWER, NEW = 2048, 129, 400
BLOCK = 32


@pytest.fixture(scope="module")
def gpu() -> ModelledWorker:
    return ModelledWorker.of(
        {"model": "m", "max_batch_size": 256, "max_num_tokens": 8192, "modelled": MODELLED}
    )


def run(name: str, gpu: ModelledWorker, asks: list[Ask], slo: Slo | None = None) -> SimulatedPoint:
    layout: Layout = LAYOUTS[name]
    return simulate(layout, dict.fromkeys(("agg", "prefill", "decode"), gpu), asks, slo)


def turns(count: int) -> list[Ask]:
    """One conversation, a turn in ten seconds."""
    lengths = [PROMPT + turn * (ANSWER + NEW) for turn in range(count)]
    return [Ask(10.0 * turn, tokens, ANSWER, (("chat", tokens),)) for turn, tokens in enumerate(lengths)]


@pytest.mark.parametrize(
    ("name", "computed", "moved"),
    [
        # In blocks: of the answer's last one and of the new tokens.
        ("2 agg", NEW + 1, 0),
        ("1P1D decode_first length", NEW + 1, 0),
        ("1P1D auto", NEW + 1, 0),
        # The prefill worker lacks the answer; the decode worker has it, so only what is new moves.
        ("1P1D decode_first", ANSWER + NEW, NEW + 16),
        ("1P1D prefill_first", ANSWER + NEW, NEW + 16),
    ],
)
def test_the_second_turn_of_a_conversation_computes_and_moves_what_its_workers_lack(
    name: str, computed: int, moved: int, gpu: ModelledWorker
) -> None:
    one, two = run(name, gpu, turns(1)), run(name, gpu, turns(2))
    assert 2 * two.computed - one.computed == computed
    assert 2 * two.moved - one.moved == moved


@pytest.mark.parametrize(
    ("name", "lacks"), [("2P2D decode_first length", NEW), ("2P2D prefill_first", ANSWER + NEW)]
)
def test_later_turns_stay_where_their_history_is(name: str, lacks: int, gpu: ModelledWorker) -> None:
    computed = 8 * run(name, gpu, turns(8)).computed
    assert computed == pytest.approx(PROMPT + 7 * lacks, abs=7 * BLOCK)


@pytest.mark.parametrize("name", ["2P1D prefill_first", "2P1D decode_first", "2 agg"])
def test_a_shared_prefix_is_computed_once_by_the_worker_to_which_its_requests_are_routed(
    name: str, gpu: ModelledWorker
) -> None:
    asks = [
        Ask(10.0 * place, PROMPT + NEW, 2, ((system, PROMPT),)) for place, system in enumerate("ABBAABBA")
    ]
    assert 8 * run(name, gpu, asks).computed == 2 * PROMPT + 8 * NEW


def test_a_prefix_at_decode_routes_requests_of_decode_first_and_not_those_of_prefill_first(
    gpu: ModelledWorker,
) -> None:
    """Under prefill_first the history of two conversations is cached at prefill, wherever their answers are."""
    first = Ask(0.0, PROMPT, ANSWER, (("chat", PROMPT),))
    again = Ask(10.0, PROMPT + ANSWER + NEW, ANSWER, (("chat", PROMPT + ANSWER + NEW),))
    point = run("1P2D decode_first length", gpu, [first, again])
    assert (point.by_one_worker, 2 * point.moved) == (0.5, PROMPT)
    point = run("2P1D prefill_first", gpu, [first, again])
    assert (point.by_one_worker, 2 * point.moved) == (0.0, PROMPT + NEW + 16)


@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
def test_the_first_token_leaves_before_kv_moves(order: str, gpu: ModelledWorker) -> None:
    facts = replace(gpu.gpus.facts, link_bytes_per_second=1e7)
    slow = replace(gpu, gpus=replace(gpu.gpus, facts=facts))
    (ttft,) = run(f"1P1D {order}", slow, turns(1)).times["ttft"]
    (latency,) = run(f"1P1D {order}", slow, turns(1)).times["latency"]
    assert [ttft] == run("2 agg", gpu, turns(1)).times["ttft"]
    assert latency - ttft > PROMPT * 131072 / 1e7


def test_prompts_that_a_decode_worker_prefills_delay_its_decode_steps(gpu: ModelledWorker) -> None:
    short = [Ask(1 + place / 50, 900, 2) for place in range(200)]
    asks = [Ask(0.0, 2000, 600), *short]
    local, remote = (
        run(f"1P1D {name}", gpu, asks).times["tpot"][0] for name in ("decode_first length", "prefill_first")
    )
    assert local > 1.5 * remote


def test_auto_prefills_locally_what_would_wait_and_decode_first_with_length_does_not(
    gpu: ModelledWorker,
) -> None:
    burst = [Ask(0.0, 4000, 8) for place in range(10)]
    # One is prefilled and two wait: --max-prefill-queue-size.
    assert run("1P1D auto", gpu, burst).by_one_worker == 0.7
    assert run("1P1D decode_first length", gpu, burst).by_one_worker == 0.0


def test_full_decode_worker_under_auto_leaves_the_answer_to_another_one(gpu: ModelledWorker) -> None:
    small = replace(gpu, max_batch=1)
    # The system prompt that the first one left at a decode worker brings both others there.
    asks = [Ask(10.0 * (place > 0), 13100, 400, (("system", 12000),)) for place in range(3)]
    auto, fixed = (run(f"1P2D {name}", small, asks) for name in ("auto", "decode_first length"))
    assert max(auto.times["latency"]) < max(fixed.times["latency"])


def test_the_rule_of_the_handlers_table_is_the_simulations(
    gpu: ModelledWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = turns(3)
    assert run("1P1D decode_first length", gpu, asks).by_one_worker == pytest.approx(2 / 3)
    monkeypatch.setitem(DECIDERS, "length", lambda: Length(max_local_prefill_length=PROMPT))
    assert run("1P1D decode_first length", gpu, asks).by_one_worker == 1


def test_history_that_was_evicted_is_computed_again(gpu: ModelledWorker) -> None:
    first, second = turns(2)
    other = Ask(5.0, 3000, 2, (("other", 3000),))
    small = replace(gpu, pool_tokens=4000)
    kept, evicted = (run("1P1D prefill_first", each, [first, other, second]) for each in (gpu, small))
    assert 3 * (evicted.computed - kept.computed) == pytest.approx(PROMPT - 1000, abs=BLOCK)


def test_point_that_cannot_keep_the_limits_is_not_simulated_to_its_end(gpu: ModelledWorker) -> None:
    asks = [Ask(float(second), 8000, 2) for second in range(40)]
    point = run("1P1D prefill_first", gpu, asks, Slo(ttft=1.0))
    assert (point.is_whole, point.goodput_share(Slo(ttft=1.0))) == (False, 0.0)
    assert run("1P1D prefill_first", gpu, asks, Slo(ttft=1000.0)).is_whole


def test_prompts_for_a_deployment_go_on_with_the_modelled_engines_answers_and_share_their_parts() -> None:
    parts = ("system", PROMPT), ("a", NEW)
    asks = [
        Ask(0.0, PROMPT + NEW, ANSWER, parts),
        Ask(1.0, PROMPT + NEW, 2, (("system", PROMPT),)),
        Ask(2.0, PROMPT + 2 * NEW, 2, (("system", PROMPT), ("a", 2 * NEW))),
    ]
    first, other, later = prompts_of(asks, "seed")
    assert [len(prompt) for prompt in (first, other, later)] == [ask.prompt_tokens for ask in asks]
    assert other[:PROMPT] == first[:PROMPT] != later[NEW : PROMPT + NEW]
    answer = [scripted_token(first, place) for place in range(ANSWER)]
    assert later[: PROMPT + NEW + ANSWER] == first + answer
