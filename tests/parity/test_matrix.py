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
from tests.parity.conftest import Examination
from tests.parity.oracle import Oracle
from tests.support.deployments import FIXED, MODEL_NAME, Fleet, Served

CASE = {case.name: case for case in CASES}

every_strategy = pytest.mark.parametrize("strategy", FIXED)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


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


@both_ways
@pytest.mark.parametrize("api", BOTH)
@pytest.mark.parametrize("strategy", [name for name in FIXED if name != "agg"])
def test_several_choices_are_refused_where_workers_share_a_request(
    strategy: str, api: Api, stream: bool, examination: Examination
) -> None:
    """A handoff carries one choice. When all would be the same, the frontend says so first."""
    prompt = say(api, "Hello?").prompt
    questions = [
        Question(api, prompt, {"n": 2, "temperature": heat}, stream, f"n=2 {api} {stream}", False)
        for heat in (0.9, 0.0)
    ]

    refusals = examination.answers(strategy, questions)

    assert [refusal.status for refusal in refusals if isinstance(refusal, Refusal)] == [400, 400]
    assert "n=2" in str(refusals[0])


def logprobs_of_prompt(served: Served, prompt: list[int]) -> list[dict[str, Any]]:
    nvext = {"extra_fields": ["engine_data"]}
    answer = served.openai.completions.create(
        model=MODEL_NAME, prompt=prompt, echo=True, max_tokens=4, temperature=0, extra_body={"nvext": nvext}
    )
    told: list[dict[str, Any]] = answer.model_dump()["nvext"]["engine_data"]["prompt_logprobs"]
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
    assert len(told) == len(prompt)
    assert all(str(behind) in entry for entry, behind in zip(told, prompt[1:], strict=False))
    assert told == logprobs_of_prompt(fleet["agg"], prompt)


@pytest.mark.parametrize("strategy", ["agg"])
def test_agg_answers_with_several_choices(strategy: str, deployed: Served) -> None:
    options: dict[str, Any] = {"model": MODEL_NAME, "prompt": "Hello?", "n": 3, "temperature": 0.9, "seed": 5}
    whole = deployed.openai.completions.create(**options, max_tokens=6)
    pieces = list(
        deployed.openai.completions.create(
            **options, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )

    texts = {choice.index: choice.text for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    streamed = dict.fromkeys(texts, "")
    for choice in (choice for piece in pieces for choice in piece.choices):
        streamed[choice.index] += choice.text
    assert streamed == texts
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == pieces[-1].usage.prompt_tokens
    assert whole.usage.completion_tokens == pieces[-1].usage.completion_tokens <= 3 * 6
    assert whole.usage.completion_tokens > 6


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
