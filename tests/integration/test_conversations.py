"""A conversation with the real frontend in prefill_first: each prefill pulls the answer before it from decode."""

from __future__ import annotations

from pathlib import Path

from tests.parity.answers import Answer, Question, ask
from tests.parity.cases import ids
from tests.parity.conftest import oracle  # noqa: F401 - a fixture
from tests.parity.oracle import Oracle
from tests.support.deployments import demo_config, served, wait_until

BLOCK = 16
ANSWER = 40
NUM_TURNS = 8
OPTIONS = {"max_tokens": ANSWER, "ignore_eos": True, "logprobs": 2, "return_tokens_as_token_ids": True}


def test_eight_turns_are_aggs_to_the_bit_and_compute_their_new_tokens(
    tmp_path: Path,
    oracle: Oracle,  # noqa: F811
) -> None:
    """New are those after the last full block before: the oracle, which has one cache, says as many are cached."""
    config = demo_config("prefill_first", tmp_path / "run", worker_args=("--pull-min-tokens", "1"))
    with served(config) as deployment:
        prompt, known = ids(50, seed=1), 0
        (decode,) = deployment.second_stage
        (prefill,) = deployment.first_stage
        for number in range(NUM_TURNS):
            question = Question("completions", prompt, OPTIONS, stream=True, salt="eight turns")
            answer = ask(deployment.openai, question)
            assert isinstance(answer, Answer), answer
            assert answer == oracle.answer(question)
            assert answer.usage is not None
            assert answer.usage.cached_tokens == known
            instance = f"{decode.instance_id:x}" if number else None
            assert answer.told.get("kv_pulled_from") == instance
            known = (len(prompt) + ANSWER - 1) // BLOCK * BLOCK
            prompt = [*prompt, *answer.token_ids, *ids(11, seed=2 + number)]
        lines = '"kv_pulled_from":'
        wait_until(lambda: prefill.log.read_text().count(lines) == NUM_TURNS - 1, "a line for each pull")
        deployment.wait_until_idle()
        assert "Traceback" not in prefill.log.read_text() + decode.log.read_text()
