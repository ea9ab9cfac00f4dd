"""With --schedule-style generation_first, and in each handoff protocol, answers are the engine's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.parity.answers import Api, ask, without_cached_tokens
from tests.parity.cases import CASES
from tests.parity.choices import Beside, check_choices
from tests.parity.oracle import Oracle
from tests.support.deployments import Served, demo_config, served, vision_model

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


#: Each style in a protocol besides the default one, each order with KV that is written; the units have the rest.
DEPLOYMENTS: tuple[tuple[str, str, str], ...] = (
    ("prefill_first", "generation_first", "dynamo"),
    ("decode_first", "generation_first", "bootstrap"),
    ("decode_first", "context_first", "two_phase"),
)
#: With context first, prefill alone answers these.
FINAL = ("max_tokens_1", "first_token_stops")
#: What counts the handoffs of a style, and on which side.
COUNTED = {
    "generation_first": ("trtllm_disagg_kv_pushes_total", "prefill"),
    "context_first": ("trtllm_disagg_kv_pulls_total", "decode"),
}


@pytest.fixture(scope="module", params=DEPLOYMENTS, ids="-".join)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    order, style, protocol = request.param
    arguments = ("--schedule-style", style, "--handoff-protocol", protocol)
    run_dir, model = tmp_path_factory.mktemp(order), str(vision_model())
    with served(demo_config(order, run_dir, model=model, worker_args=arguments)) as deployment:
        yield deployment


@pytest.fixture
def way(deployment: Served, request: pytest.FixtureRequest) -> str:
    """The deployment's name; in salts, because the oracle answers for all of them and remembers."""
    return "-".join(request.node.callspec.params["deployment"])


@pytest.mark.parametrize(("name", "api", "stream"), CHOSEN)
def test_generation_first_answers_as_one_engine_does(
    name: str, api: Api, stream: bool, deployment: Served, way: str, oracle: Oracle
) -> None:
    questions = CASE[name].questions(oracle, api, stream, f"style-{way}-")

    answers = [ask(deployment.openai, question) for question in questions]

    right = [oracle.answer(question) for question in questions]
    if CASE[name].reuses_answers:
        assert without_cached_tokens(answers) == without_cached_tokens(right)
    else:
        assert answers == right


@pytest.mark.parametrize(("beside", "api"), [("logprobs", "completions"), ("json", "chat")])
def test_each_choice_is_the_answer_to_its_seed(
    beside: Beside, api: Api, deployment: Served, oracle: Oracle
) -> None:
    check_choices(deployment, oracle, beside, api, beside == "json")


def test_same_answers_at_once_and_nothing_is_held_afterwards(
    deployment: Served, way: str, oracle: Oracle
) -> None:
    questions = [
        CASE[name].questions(oracle, api, stream, f"at-once-{way}-")[0] for name, api, stream in CHOSEN
    ]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: ask(deployment.openai, question), questions))
    assert answers == [oracle.answer(question) for question in questions]
    deployment.wait_until_idle()
    metric, role = COUNTED[way.split("-")[1]]
    moved = deployment.total(metric, deployment.of_role(role))
    assert moved >= len(CHOSEN) - len(FINAL), "it really ran in this style"
