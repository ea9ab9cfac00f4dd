"""Guided decoding in the engine core: the output matches, and is the same wherever it was made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from tests.conftest import Checkpoints
from tests.cores import Answer, Core
from tests.models import EOS
from trtllm_disagg.embedded.grammar import grammar_of
from trtllm_disagg.embedded.guided import Guides
from trtllm_disagg.embedded.messages import SamplingSpec
from trtllm_disagg.embedded.sampling_params import GuidedDecodingParams
from trtllm_disagg.errors import InvalidRequestError

PROMPT = [5 + i % 11 for i in range(40)]
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


#: The bytes in the order of the tests' tokenizer, which has two special tokens before them.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173]


def text_of(tokens: list[int]) -> str:
    return bytes(BYTES[token - 2] for token in tokens).decode()


def tokens_of(text: str) -> list[int]:
    return [BYTES.index(byte) + 2 for byte in text.encode()]


def guided(params: GuidedDecodingParams, max_tokens: int = 150, **more: Any) -> SamplingSpec:
    fields: dict[str, Any] = {"greedy": False, "end_ids": (EOS,)} | more
    return SamplingSpec(max_tokens=max_tokens, grammar=grammar_of(params), **fields)


def regex(pattern: str, **more: Any) -> SamplingSpec:
    return guided(GuidedDecodingParams(regex=pattern), **more)


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


@pytest.fixture(scope="module")
def cores(checkpoints: Checkpoints) -> Iterator[tuple[Core, Core]]:
    settings = {
        "guided_decoding_backend": "llguidance",
        "cache_transceiver_config": {"backend": "SHARED_MEMORY"},
        "max_batch_size": 32,
        "kv_cache_config": {"max_tokens": 4096},
    }
    pair = Core(checkpoints(), **settings), Core(checkpoints(), **settings)
    yield pair
    for core in pair:
        core.close()


@pytest.fixture
def core(cores: tuple[Core, Core]) -> Iterator[Core]:
    yield cores[0]
    cores[0].assert_idle()


def run(core: Core, sampling: SamplingSpec, prompt: list[int] = PROMPT) -> Answer:
    return core.run(core.add(prompt, sampling=sampling))


def run_split(cores: tuple[Core, Core], sampling: SamplingSpec, prompt: list[int] = PROMPT) -> Answer:
    """Prefill here, decode there."""
    first, second = cores
    one = msgspec.structs.replace(sampling, max_tokens=1)
    answer = first.run(first.add(prompt, sampling=one, request_type="context_only"))
    if answer.handoff is None:
        return answer
    return second.run(second.add_decode(prompt, answer.handoff, sampling=sampling, logprobs=answer.logprobs))


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
def test_every_answer_matches(core: Core, option: str) -> None:
    params, pattern = OPTIONS[option]
    for seed in range(8):
        answer = run(core, guided(params, seed=seed))
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, text_of(answer.tokens))


def test_any_json_object(core: Core) -> None:
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
    guide = core.engine._guides.start(spec)
    assert guide is not None
    for token in tokens_of("Let me see. <f="):
        guide.advance(token)
    forced = tokens_of('a>{"n"')
    for token in forced:
        assert [t for t in range(258) if not guide.barred[t]] == [token] or token == forced[-1]
        guide.advance(token)


def test_choices_are_guided_each_by_itself(core: Core) -> None:
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


def test_neighbours_do_not_matter(core: Core) -> None:
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


def test_a_grammar_that_allows_everything_changes_nothing(core: Core) -> None:
    free = SamplingSpec(max_tokens=12, greedy=False, seed=9, end_ids=(EOS,))
    only_ascii = tuple(t for t in range(258) if t < 1 or (t > 1 and BYTES[t - 2] > 127))
    spec = msgspec.structs.replace(free, bad_token_ids=only_ascii)
    anything = regex(r"(.|\n)*", max_tokens=12, seed=9, bad_token_ids=only_ascii)
    assert run(core, anything).tokens == run(core, spec).tokens


# -- ends


def test_the_end_is_allowed_exactly_when_the_grammar_is_complete(core: Core) -> None:
    guide = core.engine._guides.start(regex("a{2}b?"))
    assert guide is not None
    seen = []
    for token in tokens_of("aab"):
        seen.append((bool(guide.barred[EOS]), guide.exhausted))
        guide.advance(token)
    seen.append((bool(guide.barred[EOS]), guide.exhausted))
    assert seen == [(True, False), (True, False), (False, False), (False, True)]
    assert [t for t in range(258) if not guide.barred[t]] == [EOS]


def test_min_tokens_keeps_an_open_grammar_going(core: Core) -> None:
    for seed in range(4):
        answer = run(core, regex("a*", seed=seed, min_tokens=20, max_tokens=30))
        assert len(answer.tokens) >= 20


def test_min_tokens_cannot_stretch_a_grammar_that_is_complete(core: Core) -> None:
    answer = run(core, regex("abc", min_tokens=50))
    assert (text_of(answer.tokens), answer.finish_reason) == ("abc", "stop")


def test_max_tokens_cuts_the_answer_off(core: Core) -> None:
    answer = run(core, regex("[ab]{50}", max_tokens=7))
    assert (len(answer.tokens), answer.finish_reason) == (7, "length")


def test_ignore_eos_shows_the_end_once(core: Core) -> None:
    """The caller wants to see stop tokens; but nothing can follow this one."""
    answer = run(core, regex("abc", end_ids=()))
    assert (answer.tokens, answer.finish_reason) == ([*tokens_of("abc"), EOS], "stop")


@pytest.mark.parametrize(
    "own_end", [{"end_ids": (0,)}, {"end_ids": (), "stop_words": ((0,),), "stop_reasons": (0,)}]
)
def test_the_callers_own_end_replaces_the_models(core: Core, own_end: dict[str, Any]) -> None:
    answer = run(core, regex("abc", **own_end))
    assert (text_of(answer.tokens), answer.finish_reason) == ("abc", "stop")


def test_a_stop_word_ends_within_the_grammar(core: Core) -> None:
    stop = {"stop_words": (tuple(tokens_of("bb")),), "stop_reasons": ("bb",)}
    answer = run(core, regex("abbbbb", **stop))
    assert (text_of(answer.tokens), answer.stop_reason) == ("a", "bb")


def test_bad_tokens_yield_only_where_the_grammar_leaves_nothing_else(core: Core) -> None:
    bad = tuple(tokens_of("b"))
    assert text_of(run(core, regex("a[bc]d", bad_token_ids=bad)).tokens) == "acd"
    assert text_of(run(core, regex("abd", bad_token_ids=bad)).tokens) == "abd"


def test_an_answer_that_is_complete_with_its_first_token(cores: tuple[Core, Core], core: Core) -> None:
    for max_tokens, reason in ((1, "length"), (5, "stop")):
        spec = regex("z", max_tokens=max_tokens)
        whole = run(core, spec)
        assert (text_of(whole.tokens), whole.finish_reason) == ("z", reason)
    assert run_split(cores, spec).tokens == whole.tokens
    cores[1].assert_idle()


def test_an_empty_answer_ends_at_prefill(cores: tuple[Core, Core], core: Core) -> None:
    for answer in (run(core, regex("")), run_split(cores, regex(""))):
        assert (answer.tokens, answer.finish_reason, answer.handoff) == ([], "stop", None)


# -- what goes wrong costs its own request only


def test_a_grammar_that_the_tokenizer_does_not_know(core: Core) -> None:
    params = GuidedDecodingParams(grammar="start: <|no_such_token|>")
    running = core.add(PROMPT, 20)
    answer = run(core, guided(params))
    assert answer.category == "InvalidRequest"
    assert "no_such_token" in (answer.error or "")
    assert len(core.run(running).tokens) == 20


def test_a_grammar_that_needs_a_token_which_the_model_lacks(checkpoints: Checkpoints) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints(), local_files_only=True)
    guides = Guides(tokenizer, vocab_size=tokens_of("c")[0], end_ids=[EOS, 300])
    guide = guides.start(regex("abb?c?"))
    assert guide is not None
    assert guide.end_ids == (EOS,)
    for token in tokens_of("ab"):
        guide.advance(token)
    assert not guide.barred[EOS]
    with pytest.raises(InvalidRequestError, match="no token of this model"):
        guides.start(regex("c"))


def test_a_first_token_of_another_grammar_is_refused(cores: tuple[Core, Core], core: Core) -> None:
    handoff = core.prefill(PROMPT, regex("a[bc]*"))
    decode = cores[1]
    answer = decode.run(decode.add_decode(PROMPT, handoff, sampling=regex("x+")))
    assert (answer.category, answer.tokens) == ("InvalidRequest", [])
    assert "does not fit" in (answer.error or "")
    decode.assert_idle()


def test_a_failing_choice_ends_its_request_once(core: Core) -> None:
    request = core.add(PROMPT, sampling=regex("[ab]{9}"), choices=3)
    core.step()
    for sequence in core.engine.scheduler.find(request):
        assert sequence.guide is not None
        # As when the parser has run out of its limits.
        sequence.guide._matcher.consume_token(tokens_of("!")[0])
    [output] = core.step()
    assert (output.request_id, output.error_category) == (request, "InvalidRequest")


def test_an_abort_in_the_middle(core: Core) -> None:
    request = core.add(PROMPT, sampling=regex("[ab]{90}"))
    core.step()
    core.engine.abort(request)
    assert core.run(request).finish_reason == "cancelled"


def test_a_grammar_is_compiled_once(core: Core) -> None:
    compiled = core.engine._guides._compiled  # type: ignore[union-attr]
    run(core, regex("q{3}"))
    misses = compiled.cache_info().misses
    run(core, regex("q{3}", seed=5))
    assert compiled.cache_info().misses == misses


def test_without_a_backend_the_core_refuses(checkpoints: Checkpoints) -> None:
    core = Core(checkpoints())
    answer = run(core, regex("a"))
    assert (answer.category, answer.tokens) == ("InvalidRequest", [])
    assert "guided_decoding_backend" in (answer.error or "")
    core.close()
