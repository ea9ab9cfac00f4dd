"""Guided decoding in the engine core: the output matches, and is the same wherever it was made."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.cores import Core
from tests.support.guiding import PROMPT, guide_of, guided, regex, run, run_split, text_of, tokens_of
from tests.support.models import EOS
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.params.request_params import GuidedDecodingParams

OTHER = [200 - i % 13 for i in range(70)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", "tree frog"]},
        "age": {"type": "integer", "minimum": 3, "maximum": 17},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(red|green|blue)-[0-9]{2,4}(;[a-f]{1,3})?"
#: Each option with what its outputs look like.
OPTIONS: dict[str, tuple[GuidedDecodingParams, str]] = {
    "regex": (GuidedDecodingParams(regex=REGEX), REGEX),
    "lark": (GuidedDecodingParams(grammar='start: word ("," word)~0..3\nword: /[xyz]{1,4}/'), r"[xyz,]+"),
    "gbnf": (GuidedDecodingParams(grammar='root ::= "yes" | "no" [!?]'), r"yes|no[!?]"),
}


def assert_fits_schema(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "kind", "age", "tags"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 6
    assert found["kind"] in ("cat", "dog", "tree frog")
    assert isinstance(found["age"], int)
    assert 3 <= found["age"] <= 17
    assert len(found["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in found["tags"])


# -- the output matches


def test_every_answer_fits_the_schema(core: Core) -> None:
    params = GuidedDecodingParams(json=SCHEMA)
    requests = [core.add(PROMPT, sampling=guided(params, seed=seed)) for seed in range(24)]
    core.run(*requests)
    answers = [core.answers[request, 0] for request in requests]
    for answer in answers:
        assert answer.finish_reason == "stop"
        assert_fits_schema(text_of(answer.tokens))
    assert len({tuple(answer.tokens) for answer in answers}) > 12, "temperature 1, and yet all the same"


@pytest.mark.parametrize("option", OPTIONS)
def test_every_guided_answer_matches_its_pattern(core: Core, option: str) -> None:
    params, pattern = OPTIONS[option]
    for seed in range(8):
        answer = run(core, guided(params, seed=seed))
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, text_of(answer.tokens))


def test_a_json_object_guide_gives_an_object_for_every_seed(core: Core) -> None:
    # {"":1}: a random model would go on for ever inside of a string.
    allowed = tuple(t for t in range(258) if t not in tokens_of('{}":1') and t != EOS)
    params = GuidedDecodingParams(json_object=True)
    for seed in range(4):
        answer = run(core, guided(params, max_tokens=60, seed=seed, bad_token_ids=allowed))
        text = text_of(answer.tokens)
        assert text.startswith("{")
        assert answer.finish_reason == "length" or isinstance(json.loads(text), dict)


def test_structural_tags_constrain_what_follows_their_trigger(core: Core) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    structure = {"begin": "<f=a>", "schema": schema | {"additionalProperties": False}, "end": "</f>"}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    spec = guided(GuidedDecodingParams(structural_tag=json.dumps(tag)))
    # As if the model had begun a call.
    guide = guide_of(core, spec)
    for token in tokens_of("Let me see. <f="):
        guide.advance(token)
    forced = tokens_of('a>{"n"')
    for token in forced:
        assert [t for t in range(258) if not guide.barred[t]] == [token] or token == forced[-1]
        guide.advance(token)


def test_each_choice_follows_the_guide_independently(core: Core) -> None:
    request = core.add(PROMPT, sampling=guided(GuidedDecodingParams(regex=REGEX), seed=3), choices=4)
    core.run(request)
    texts = [text_of(core.answers[request, i].tokens) for i in range(4)]
    assert all(re.fullmatch(REGEX, text) for text in texts)
    assert len(set(texts)) > 1


# -- the same everywhere


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("option", [*OPTIONS, "json"])
def test_disaggregated_gives_the_same_tokens(
    cores: tuple[Core, Core], core: Core, option: str, greedy: bool
) -> None:
    params = GuidedDecodingParams(json=SCHEMA) if option == "json" else OPTIONS[option][0]
    for seed in range(3):
        spec = guided(params, max_tokens=60, greedy=greedy, seed=seed, logprobs=2)
        whole, split = run(core, spec), run_split(cores, spec)
        assert split.error is None
        assert (split.tokens, split.finish_reason) == (whole.tokens, whole.finish_reason)
        assert split.logprobs == whole.logprobs
    cores[1].assert_idle()


def test_guided_answer_is_the_same_alone_and_in_a_batch(core: Core) -> None:
    specs = [
        guided(GuidedDecodingParams(json=SCHEMA), seed=1, logprobs=1),
        SamplingSpec(max_tokens=40),
        regex(REGEX, seed=2),
        SamplingSpec(max_tokens=40, greedy=False, seed=5, logprobs=1),
        regex("[ab]{30}", greedy=True),
        SamplingSpec(max_tokens=40, repetition_penalty=1.3),
    ]
    prompts = [PROMPT, OTHER, PROMPT, PROMPT, OTHER, OTHER]
    alone = [run(core, spec, prompt) for spec, prompt in zip(specs, prompts, strict=True)]
    requests = [core.add(prompt, sampling=spec) for spec, prompt in zip(specs, prompts, strict=True)]
    core.run(*requests)
    for request, expected in zip(requests, alone, strict=True):
        assert core.answers[request, 0].tokens == expected.tokens
        assert core.answers[request, 0].logprobs == expected.logprobs
