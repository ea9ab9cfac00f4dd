"""Whatever way a request asks for, in whatever order its deployment is: the engine's own answer, and it says which."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.answers import Answer, Api, Question, Refusal, ask
from tests.parity.cases import CASES, WHAT, seen
from tests.parity.choices import Beside, check_choices
from tests.parity.oracle import Oracle
from tests.support.deployments import RUN_BY_WORKERS, Served
from trtllm_disagg.strategies import orders, spec_of

CASE = {case.name: case for case in CASES}
#: One of each kind.
CHOSEN: tuple[tuple[str, Api, bool], ...] = (
    ("greedy", "chat", True),
    ("seeded_penalties", "completions", False),
    ("logprobs_seeded", "chat", True),
    ("max_tokens_1", "completions", True),
    ("first_token_stops", "completions", False),
    ("stop_string", "chat", True),
    ("image", "chat", True),
)
WAYS = (*RUN_BY_WORKERS, "local", "auto")

every_order = pytest.mark.parametrize("strategy", RUN_BY_WORKERS)


def asking(question: Question, *annotations: str) -> Question:
    return replace(question, annotations=annotations)


@pytest.mark.parametrize(("name", "api", "stream"), CHOSEN)
@pytest.mark.parametrize("way", WAYS)
@every_order
def test_a_request_that_asks_for_an_order_is_answered_as_by_one_engine(
    strategy: str, way: str, name: str, api: Api, stream: bool, deployed: Served, oracle: Oracle
) -> None:
    (question,), (second,) = (
        CASE[name].questions(oracle, api, stream, f"way-{way}-{strategy}-"),
        deployed.second_stage,
    )
    pin = f"{second.instance_id:x}"
    pins = [f"disagg:next={pin}"] if way == strategy else []

    answer = ask(deployed.openai, asking(question, f"disagg:{way}", *pins))

    assert answer == oracle.answer(question)
    assert isinstance(answer, Answer)
    chosen = (strategy, "auto_image") if name == "image" else ("local", "auto_short")
    expected = chosen if way == "auto" else (way, "annotation")
    assert (answer.told["strategy"], answer.told["reason"]) == expected
    assert not pins or answer.told.get(f"{second.role}_instance", pin) == pin
    relayed = [each.name for each in orders() if each.entry_role != spec_of(strategy).entry_role]
    assert ("first_stage" in answer.told) == (way in relayed)


@pytest.mark.parametrize(
    ("beside", "api", "stream"),
    [("logprobs", "chat", True), ("json", "chat", False), ("echo", "completions", False)],
)
@every_order
def test_auto_gives_each_choice_the_answer_to_its_seed(
    strategy: str, beside: Beside, api: Api, stream: bool, deployed: Served, oracle: Oracle
) -> None:
    check_choices(deployed, oracle, beside, api, stream, "disagg:auto")


@every_order
def test_a_long_request_is_not_kept_by_auto(strategy: str, deployed: Served, oracle: Oracle) -> None:
    (question,) = CASE["long_prompt"].questions(oracle, "completions", False, f"auto-{strategy}-")
    answer = ask(deployed.openai, asking(question, "disagg:auto"))
    assert answer == oracle.answer(question)
    assert isinstance(answer, Answer)
    assert (answer.told["strategy"], answer.told["reason"]) == (strategy, "auto_long")
    assert answer.told["uncached"] > 1000


@every_order
def test_unknown_or_contradicting_annotations_are_refused_with_the_allowed_ones(
    strategy: str, deployed: Served
) -> None:
    question = seen(WHAT, "red circle")
    refusals = [
        ask(deployed.openai, asking(question, *words))
        for words in (("disagg:sideways",), ("disagg:local", "disagg:auto"), ("disagg:next=5",))
    ]
    assert [refusal.status for refusal in refusals if isinstance(refusal, Refusal)] == [400] * 3
    assert "expected one of disagg:auto, disagg:decode_first, disagg:local" in str(refusals[0])
    assert "contradict each other" in str(refusals[1])
    assert "instance 5 is not known" in str(refusals[2])


@every_order
def test_each_order_is_counted_and_nothing_is_held_afterwards(strategy: str, deployed: Served) -> None:
    (worker,) = deployed.first_stage
    assert worker.labels("trtllm_disagg_requests_total", "strategy") >= {
        "local",
        "prefill_first",
        "decode_first",
    }
    assert worker.labels("trtllm_disagg_requests_total", "reason") >= {
        "annotation",
        "auto_short",
        "auto_long",
    }
    assert worker.labels("trtllm_disagg_requests_total", "fallback") == {"none"}
    deployed.wait_until_idle()
