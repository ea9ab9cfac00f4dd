"""Whatever is wrong is named, with its value and what is allowed; and a request never hurts a deployment."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.answers import Api, Question, Refusal, ask
from tests.support.deployments import FIXED, Fleet, Served

TOO_LONG = [300] * 2100

BAD_REQUESTS: dict[str, tuple[Api, Any, dict[str, Any], str]] = {
    "too_long": ("completions", TOO_LONG, {}, "Invalid request"),
    "empty": ("completions", "", {}, "empty"),
    "no_such_token": ("completions", [999_999], {}, "Invalid request"),
    "negative_max_tokens": ("chat", "Hello?", {"max_tokens": -5}, "`-5`, expected u32"),
    "max_tokens_0": ("completions", "Hello?", {"max_tokens": 0}, "must be greater than 0, got 0"),
    "temperature": ("chat", "Hello?", {"temperature": 3}, "Temperature must be between 0 and 2, got 3"),
    "top_p": ("completions", "Hello?", {"top_p": 1.5}, "between 0 and 1, got 1.5"),
    "logprobs": ("completions", "Hello?", {"logprobs": 70}, "between 0 and 5, got 70"),
    "best_of": ("completions", "Hello?", {"best_of": 2}, "best_of=2"),
    "stop_token": ("completions", "Hello?", {"stop_token_ids": [999_999]}, "stop_token_ids holds 999999"),
    "repetition": ("chat", "Hello?", {"repetition_penalty": -1.0}, "-1"),
    "unknown_key": ("chat", "Hello?", {"bogus": 1}, "bogus"),
    "unknown_nvext": ("chat", "Hello?", {"nvext": {"bogus": 1}}, "bogus"),
}


@pytest.mark.parametrize("bad", BAD_REQUESTS)
@pytest.mark.parametrize("strategy", FIXED)
def test_a_bad_request_is_refused_alike(strategy: str, bad: str, deployed: Served, fleet: Fleet) -> None:
    api, prompt, options, words = BAD_REQUESTS[bad]
    if api == "chat":
        prompt = [{"role": "user", "content": prompt}]
    # Whole and streamed in turn: each bad request and each strategy meets both.
    stream = bool((list(BAD_REQUESTS).index(bad) + FIXED.index(strategy)) % 2)
    question = Question(api, prompt, options, stream)

    refusal = ask(deployed.openai, question)

    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert words in refusal.message
    assert refusal == ask(fleet["agg"].openai, question)


@pytest.mark.parametrize("strategy", FIXED)
def test_deployment_still_answers_after_all_refused_requests(
    strategy: str, deployed: Served, fleet: Fleet
) -> None:
    question = Question("completions", "Are you there?", {"max_tokens": 8}, salt="afterwards")

    assert ask(deployed.openai, question) == ask(fleet["agg"].openai, question)

    deployed.wait_until_idle()
