"""Each order on the recording engine: all of a deployment but the engine, in an environment that may have no torch.
The workers are those of examples/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.ask_for_an_order import ask
from tests.support.deployments import demo_config, served
from trtllm_disagg.common.interpreter import python

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("order", "other", "example", "arguments", "of_short"),
    [
        (
            "prefill_first",
            "decode_first",
            "own_decider.py",
            ("--prefill-decider", "long_answer", "--long-answer-tokens", "8"),
            ("local", "short_answer"),
        ),
        (
            "decode_first",
            "prefill_first",
            "own_selector.py",
            ("--next-router", "random"),
            ("decode_first", "always"),
        ),
    ],
)
def test_a_deployment_of_example_workers_answers_in_its_order_and_in_the_one_that_a_client_asks_for(
    order: str,
    other: str,
    example: str,
    arguments: tuple[str, ...],
    of_short: tuple[str, str],
    tmp_path: Path,
) -> None:
    settings = {"worker_command": python(str(EXAMPLES / example)), "worker_args": arguments}
    config = demo_config(order, tmp_path / "run", engine="recording", engine_configs={}, **settings)

    def answer(max_tokens: int) -> tuple[int, tuple[str, str], list[str] | None]:
        """(tokens, (order, reason), fallbacks)"""
        asked = {"ignore_eos": True, "nvext": {"extra_fields": ["engine_data"]}}
        told: dict[str, Any] = deployed.openai.completions.create(
            model=config.served_model_name, prompt=[5, 6, 7, 8], max_tokens=max_tokens, extra_body=asked
        ).to_dict()
        tokens, trace = told["usage"]["completion_tokens"], told["nvext"]["engine_data"]["disagg"]
        return tokens, (trace["strategy"], trace["reason"]), trace.get("fallbacks")

    with served(config) as deployed:
        tokens, (ran, _), fallbacks = answer(9)
        short = answer(8)
        text, asked_for = ask(deployed.url, other, "hello")
    assert (tokens, ran, fallbacks) == (9, order, None)
    assert short == (8, of_short, None)
    assert text
    assert asked_for == other
