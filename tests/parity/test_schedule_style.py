"""With --schedule-style generation_first both orders give the engine's own answers, as they do without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.deployments import WORKER_SIDE, Served, demo_config, served
from tests.parity.answers import Api, ask, without_cached_tokens
from tests.parity.cases import CASES
from tests.parity.oracle import Oracle
from trtllm_disagg.deployment.plan import Strategy

CASE = {case.name: case for case in CASES}
#: One of each kind; the engines' tests have the rest.
CHOSEN: tuple[tuple[str, Api, bool], ...] = (
    ("greedy", "chat", True),
    ("greedy", "completions", False),
    ("seeded_top_p", "completions", True),
    ("logprobs_seeded", "chat", True),
    ("max_tokens_1", "chat", False),
    ("first_token_stops", "completions", False),
    ("stop_string", "chat", True),
    ("same_again", "completions", False),
    ("long_prompt", "completions", True),
)


@pytest.fixture(scope="module", params=WORKER_SIDE)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    order: Strategy = request.param
    arguments = ("--schedule-style", "generation_first")
    with served(demo_config(order, tmp_path_factory.mktemp(order), worker_args=arguments)) as deployment:
        yield deployment


@pytest.mark.parametrize(("name", "api", "stream"), CHOSEN)
def test_same_answer(name: str, api: Api, stream: bool, deployment: Served, oracle: Oracle) -> None:
    questions = CASE[name].questions(oracle, api, stream, f"style-{deployment.strategy}-")

    answers = [ask(deployment.openai, question) for question in questions]

    right = [oracle.answer(question) for question in questions]
    if CASE[name].reuses_answers:
        assert without_cached_tokens(answers) == without_cached_tokens(right)
    else:
        assert answers == right


def test_same_answers_at_once_and_nothing_is_held_afterwards(deployment: Served, oracle: Oracle) -> None:
    questions = [
        CASE[name].questions(oracle, api, stream, f"at-once-{deployment.strategy}-")[0]
        for name, api, stream in CHOSEN
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: ask(deployment.openai, question), questions))
    assert answers == [oracle.answer(question) for question in questions]
    deployment.wait_until_idle()
    pushed = deployment.total("trtllm_disagg_kv_pushes_total", deployment.of_role("prefill"))
    assert pushed >= len(CHOSEN), "it really ran in this style"
