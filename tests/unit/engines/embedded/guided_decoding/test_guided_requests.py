"""Guided decoding on the worker's side: what Dynamo sends, what is refused, and how it is told."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.handling import request
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engine.sampling import sampling_params_of
from trtllm_disagg.engines.embedded.api.request import sampling_spec
from trtllm_disagg.engines.embedded.ipc.messages import Ready
from trtllm_disagg.engines.embedded.model.guided_decoding import grammar_of
from trtllm_disagg.engines.embedded.params.request_params import GuidedDecodingParams, SamplingParams
from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.wire.bodies import require_splittable

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"triggers": ["a"]}
ENDLESS = 'start: %json {"multipleOf": 99999989}'
READY = Ready(
    num_blocks=1, tokens_per_block=32, vocab_size=100, max_seq_len=64, transport="off", end_ids=[1], pids=[1]
)


def spec_of(params: SamplingParams, backend: str | None = "llguidance") -> Any:
    return sampling_spec(
        params,
        num_prompt=3,
        request_type="context_and_generation",
        ready=READY,
        end_ids=READY.end_ids,
        tokenize=lambda text: [2],
        guided_backend=backend,
    )


class ByteTokens:
    """A tokenizer for llguidance: byte b is token b, 256 is the end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([b]) for b in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()))


def matches(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


# -- GuidedDecodingParams


class Pet(pydantic.BaseModel):
    kind: str


@pytest.mark.parametrize(
    ("params", "good", "bad"),
    [
        ({"json": SCHEMA}, '{"a": 1}', '{"a": "x"}'),
        ({"json": json.dumps(SCHEMA)}, '{"a": 1}', '{"a":1}'),
        ({"json": SCHEMA}, '{"a": 1}', '{"a": 1 }'),
        ({"json": "true"}, "[1, {}]", "[1,\n{}]"),
        ({"json": {}}, "[1, null]", "[1"),
        ({"json": {"type": "number", "multipleOf": 0.01}}, "1.25", "1.255"),
        ({"json": {"type": "integer", "multipleOf": 86400}}, "172800", "172801"),
        ({"json": {"properties": {"multipleOf": {"const": 99999989}}}}, '{"multipleOf": 99999989}', "{"),
        ({"json": Pet}, '{"kind": "cat"}', "{}"),
        ({"json_object": True}, '{"any": []}', "[]"),
        ({"regex": "a+b"}, "aab", "b"),
        ({"grammar": 'start: "x" | "y"'}, "y", "z"),
        ({"grammar": 'root ::= "x" | "y"'}, "y", "z"),
    ],
)
def test_each_option_is_a_grammar(params: dict[str, Any], good: str, bad: str) -> None:
    grammar = grammar_of(GuidedDecodingParams(**params))
    assert grammar is not None
    assert matches(grammar, good)
    assert not matches(grammar, bad)


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"json": "{"}, "json: Expecting property name"),
        ({"json": {"type": "no such type"}}, "json: Invalid type: no such type"),
        ({"json": {"type": "object", "dependentSchemas": {"a": {}}}}, "json: Unimplemented keys"),
        ({"json": {1, 2}}, "json: .*not JSON serializable"),
        ({"json": {"$ref": "http://127.0.0.1/schema"}}, "json: Resource"),
        ({"json": '{"items":' * 99_999 + "{}" + "}" * 99_999}, "json: maximum recursion depth"),
        # llguidance would build one state for each remainder, without end.
        ({"json": {"multipleOf": 99999989}}, "json: .*multipleOf"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "json: .*multipleOf"),
        ({"json": {"multipleOf": 2**-15}}, "json: .*multipleOf"),
        ({"grammar": 'start: %json {"multipleOf": 1e999}'}, "grammar: .*multipleOf"),
        ({"grammar": 'start: %json {"multiple\\u004ff": 99999989}'}, "grammar: .*multipleOf"),
        (
            {"structural_tag": json.dumps(TAGS | {"structures": [{"begin": "a", "schema": ENDLESS}]})},
            "structural_tag: .*multipleOf",
        ),
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"regex": "(?=a)"}, "regex: .*look-around"),
        ({"grammar": "start: ("}, "grammar: "),
        ({"structural_tag": "no json"}, "structural_tag: Expecting value"),
        ({"structural_tag": '{"type": "structural_tag", "format": {}}'}, "structural_tag: .*`structures`"),
        (
            {"structural_tag": '{"structures": ["a"], "triggers": ["a"]}'},
            "structural_tag: 'a' in `structures`",
        ),
        (
            {"structural_tag": '{"structures": [{"begin": "b"}], "triggers": ["a"]}'},
            "structural_tag: begin 'b' does not start with",
        ),
    ],
)
def test_a_bad_option_is_named(params: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)SamplingParams.guided_decoding.{complaint}"):
        spec_of(SamplingParams(guided_decoding=GuidedDecodingParams(**params)))


def test_without_an_option_nothing_is_guided() -> None:
    assert spec_of(SamplingParams(guided_decoding=GuidedDecodingParams())).grammar is None
    assert spec_of(SamplingParams()).grammar is None


def test_without_a_backend_it_is_refused_by_name() -> None:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"))
    with pytest.raises(ValueError, match=r"which is not set .*--guided-decoding-backend llguidance"):
        spec_of(params, backend=None)


# -- from Dynamo


def sampling_of(guided: dict[str, Any]) -> Any:
    asked = request(sampling_options={"guided_decoding": guided})
    return sampling_params_of(load_api("embedded"), asked, None, max_seq_len=100)


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        ({"json": SCHEMA, "regex": None, "backend": "xgrammar"}, GuidedDecodingParams(json=SCHEMA)),
        ({"json": {}}, GuidedDecodingParams(json={})),
        ({"json": True}, GuidedDecodingParams(json={})),
        ({"json": json.dumps(SCHEMA)}, GuidedDecodingParams(json=json.dumps(SCHEMA))),
        ({"regex": "a+", "choice": None}, GuidedDecodingParams(regex="a+")),
        ({"regex": "a+", "choice": []}, GuidedDecodingParams(regex="a+")),
        ({"grammar": "start: A", "json": None}, GuidedDecodingParams(grammar="start: A")),
        ({"choice": ["a.b", "c"]}, GuidedDecodingParams(regex=r"(a\.b|c)")),
        ({"structural_tag": {"triggers": []}}, GuidedDecodingParams(structural_tag='{"triggers": []}')),
        ({"structural_tag": '{"a": 1}'}, GuidedDecodingParams(structural_tag='{"a": 1}')),
        ({"json_object": True}, GuidedDecodingParams(json_object=True)),
        *((none, None) for none in ({}, {"json": None, "regex": None}, {"choice": None})),
    ],
)
def test_guided_options_of_the_frontend_reach_the_engine(
    guided: dict[str, Any], expected: GuidedDecodingParams | None
) -> None:
    assert sampling_of(guided).guided_decoding == expected


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5), st.text(max_size=8))
def test_a_choice_matches_itself_and_nothing_else(choices: list[str], other: str) -> None:
    grammar = grammar_of(sampling_of({"choice": choices}).guided_decoding)
    assert grammar is not None
    for choice in choices:
        assert matches(grammar, choice)
    assert matches(grammar, other) == (other in choices)


@pytest.mark.parametrize(
    ("guided", "named"),
    [
        ({"json": False}, "guided_json: 'False' is not allowed; expected a JSON schema"),
        ({"json": ""}, "guided_json: '' "),
        ({"json": 0}, "guided_json: '0' "),
        ({"json": []}, r"guided_json: '\[\]' "),
        ({"regex": ""}, "guided_regex: '' .* a regular expression that is not empty"),
        ({"grammar": ""}, "guided_grammar: '' .* a grammar that is not empty"),
        ({"grammar": " \n"}, "guided_grammar: "),
        ({"choice": []}, r"guided_choice: '\[\]' .* at least one"),
        ({"choice": [], "json_object": False}, r"guided_choice: '\[\]' .* at least one"),
        ({"choice": ["a", 5]}, "guided_choice: .* a list of texts"),
        ({"choice": "abc"}, "guided_choice: 'abc' .* a list of texts"),
        ({"structural_tag": {}}, "guided_structural_tag: "),
        ({"json_object": "yes"}, "guided_json_object: 'yes' .* true or false"),
    ],
)
def test_an_empty_guide_is_refused_by_its_name(guided: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        request(sampling_options={"guided_decoding": guided})


def test_refusal_of_prompt_logprobs_names_echo() -> None:
    with pytest.raises(InvalidRequestError, match=r"echo \(or prompt_logprobs\) is not served"):
        require_splittable(request(output_options={"prompt_logprobs": 1}), gets_prompt_logprobs=False)
