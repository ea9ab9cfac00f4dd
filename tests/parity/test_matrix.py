"""Every strategy gives the answer of agg, and agg that of the engine: same tokens, end, logprobs and usage.

Float32 is exact in all of them, so nothing here has a tolerance (docs: embedded engine).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError

from tests.parity.answers import Answer, Api, Question, Refusal, ask, without_cached_tokens
from tests.parity.cases import BOTH, CASES, MIXTURE, ROOM, Case, ids, say
from tests.parity.choices import Beside, check_choices
from tests.parity.conftest import Examination
from tests.parity.oracle import Oracle
from tests.support.deployments import FIXED, MODEL_NAME, Fleet, Served

CASE = {case.name: case for case in CASES}

every_strategy = pytest.mark.parametrize("strategy", FIXED)


#: Each case by each API, and in both ways where it has two: what makes one answer of chunks is Dynamo's.
ROWS = [
    pytest.param(case, api, (number + place) % 2 == 1, id=f"{case}-{api}")
    for number, case in enumerate(CASES)
    for place, api in enumerate(case.apis)
]


@pytest.mark.parametrize(("case", "api", "stream"), ROWS)
@every_strategy
def test_every_strategy_answers_as_one_engine_does(
    strategy: str, case: Case, api: Api, stream: bool, oracle: Oracle, examination: Examination
) -> None:
    questions = case.questions(oracle, api, stream)

    answers = examination.answers(strategy, questions)

    right = examination.right_answers(strategy, questions)
    if case.reuses_answers and strategy != "agg":
        answers, right = without_cached_tokens(answers), without_cached_tokens(right)
    assert answers == right


@every_strategy
def test_same_answers_when_all_are_asked_at_once(
    strategy: str, deployed: Served, oracle: Oracle, examination: Examination
) -> None:
    def questions(salt: str) -> list[Question]:
        cases = [(CASE[name], api, stream) for name, api, stream in MIXTURE]
        return [case.questions(oracle, api, stream, salt)[0] for case, api, stream in cases]

    with ThreadPoolExecutor(len(MIXTURE)) as pool:
        answers = list(pool.map(lambda question: ask(deployed.openai, question), questions("at-once-")))

    assert answers == [examination.right_answers(strategy, [q])[0] for q in questions("alone-")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("beside", "api"),
    [("logprobs", "chat"), ("logprobs", "completions"), ("json", "chat"), ("echo", "completions")],
)
@every_strategy
def test_each_choice_is_the_answer_to_its_seed_and_the_prompt_counts_once(
    strategy: str, beside: Beside, api: Api, stream: bool, deployed: Served, oracle: Oracle
) -> None:
    if strategy == "router" and beside == "echo":
        with pytest.raises(BadRequestError, match="echo"):
            check_choices(deployed, oracle, beside, api, stream)
        return
    check_choices(deployed, oracle, beside, api, stream)


@pytest.mark.parametrize("api", BOTH)
@pytest.mark.parametrize("strategy", FIXED)
def test_choices_that_would_be_the_same_are_refused(
    strategy: str, api: Api, examination: Examination
) -> None:
    """By the frontend, where the request has a temperature."""
    question = Question(api, say(api, "Hello?").prompt, {"n": 2, "temperature": 0.0}, False, f"n=2 {api}")
    [refusal] = examination.answers(strategy, [question])
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


def logprobs_of_prompt(served: Served, prompt: list[int]) -> list[dict[str, Any] | None]:
    nvext = {"extra_fields": ["engine_data"]}
    answer = served.openai.completions.create(
        model=MODEL_NAME, prompt=prompt, echo=True, max_tokens=4, temperature=0, extra_body={"nvext": nvext}
    )
    told: list[dict[str, Any] | None] = answer.model_dump()["nvext"]["engine_data"]["prompt_logprobs"]
    return told


@every_strategy
def test_logprobs_of_the_prompt_are_those_of_agg_or_refused(
    strategy: str, deployed: Served, fleet: Fleet
) -> None:
    prompt = ids(40, seed=7)
    if strategy == "router":
        with pytest.raises(BadRequestError, match="echo"):
            logprobs_of_prompt(deployed, prompt)
        return
    told = logprobs_of_prompt(deployed, prompt)
    assert told[0] is None
    assert all(str(token) in (entry or ()) for entry, token in zip(told[1:], prompt[1:], strict=True))
    assert told == logprobs_of_prompt(fleet["agg"], prompt)


@pytest.mark.parametrize("api", BOTH)
def test_parity_cases_end_as_their_names_say(api: Api, oracle: Oracle) -> None:
    """They are made from the model's own answers, so a new model must not make them pointless."""

    def answer(name: str) -> Answer:
        return oracle.answer(CASE[name].questions(oracle, api, False, "again")[-1])

    assert len(answer("greedy").token_ids) >= 4
    stopped = {name: answer(name) for name in ("stop_token", "stop_string")}
    assert {a.finish_reason for a in stopped.values()} == {"stop"}
    assert all(2 <= len(a.token_ids) < ROOM for a in stopped.values())
    assert (answer("first_token_stops").token_ids, answer("first_token_stops").finish_reason) == ((), "stop")
    assert answer("stop_string_at_once").text == ""
    assert answer("min_tokens").finish_reason == "length" or len(answer("min_tokens").token_ids) >= 24
    if api == "completions":
        assert (answer("first_token_is_eos").token_ids, answer("first_token_is_eos").finish_reason) == (
            (),
            "stop",
        )


@every_strategy
def test_nothing_is_held_afterwards(strategy: str, deployed: Served) -> None:
    deployed.wait_until_idle()
