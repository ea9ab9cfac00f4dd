"""`n` above 1, beside other options: each choice is the answer to its own seed, and the prompt counts once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from tests.parity.answers import Api, ask_each
from tests.parity.cases import say, words
from tests.parity.oracle import Oracle
from tests.support.deployments import Served

Beside = Literal["logprobs", "json", "echo"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}},
    "required": ["name"],
    "additionalProperties": False,
}
MORE: dict[Beside, dict[str, Any]] = {
    # A stop that some choices find and others do not.
    "logprobs": {"stop": " a"},
    "json": {"guided_json": SCHEMA, "temperature": 2.0},
    "echo": {"echo": True},
}


def check_choices(
    served: Served, oracle: Oracle, beside: Beside, api: Api, stream: bool, *annotations: str
) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2} if api == "chat" else {"logprobs": 2}
    options: dict[str, Any] = {
        "n": 4,
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 2**62 + 5,
        "presence_penalty": 0.4,
    }
    # A longer prompt than a block of the cache.
    said = say(api, f"Add these up: {words(40)}", **options | wanted | MORE[beside])
    said = replace(said, options={**said.options, "return_tokens_as_token_ids": True})
    salt = f"choices-{served.deployment.run_dir.name}-{annotations}-{beside}-{api}-{stream}"
    question = replace(said, stream=stream, salt=salt, wants_token_ids=False, annotations=annotations)

    choices = ask_each(served.openai, question)

    seeds = range(options["seed"], options["seed"] + 4)
    right = [oracle.answer(replace(question, options={**question.options, "seed": seed})) for seed in seeds]
    assert [(c.text, c.finish_reason) for c in choices] == [(r.text, r.finish_reason) for r in right]
    assert [c.logprobs for c in choices] == [r.logprobs for r in right]
    assert len({c.text for c in choices}) > 1
    counted = {(c.usage.prompt_tokens, c.usage.completion_tokens) for c in choices if c.usage}
    assert counted == {(len(oracle.prompt_ids(question)), sum(len(r.token_ids) for r in right))}
