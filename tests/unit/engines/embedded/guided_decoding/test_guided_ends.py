"""How a guided answer ends, and that one which goes wrong costs its own request only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.guiding import PROMPT, guide_of, guided, regex, run, run_split, text_of, tokens_of
from tests.support.models import EOS
from trtllm_disagg.engines.embedded.model.guided_decoding import Guides, GuideTokenizer, read_guide_tokenizer
from trtllm_disagg.engines.embedded.params.request_params import GuidedDecodingParams
from trtllm_disagg.errors import ConfigError, InvalidRequestError

# -- ends


def test_end_token_is_allowed_only_when_the_grammar_is_complete(core: Core) -> None:
    guide = guide_of(core, regex("a{2}b?"))
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


def test_ignore_eos_returns_the_grammars_end_token_once(core: Core) -> None:
    """The caller wants to see stop tokens; but nothing can follow this one."""
    answer = run(core, regex("abc", end_ids=()))
    assert (answer.tokens, answer.finish_reason) == ([*tokens_of("abc"), EOS], "stop")


@pytest.mark.parametrize(
    "own_end", [{"end_ids": (0,)}, {"end_ids": (), "stop_words": ((0,),), "stop_reasons": (0,)}]
)
def test_end_id_of_the_request_replaces_the_models(core: Core, own_end: dict[str, Any]) -> None:
    answer = run(core, regex("abc", **own_end))
    assert (text_of(answer.tokens), answer.finish_reason) == ("abc", "stop")


def test_a_stop_word_ends_within_the_grammar(core: Core) -> None:
    stop = {"stop_words": (tuple(tokens_of("bb")),), "stop_reasons": ("bb",)}
    answer = run(core, regex("abbbbb", **stop))
    assert (text_of(answer.tokens), answer.stop_reason) == ("a", "bb")


def test_bad_tokens_are_used_only_where_the_grammar_allows_nothing_else(core: Core) -> None:
    bad = tuple(tokens_of("b"))
    assert text_of(run(core, regex("a[bc]d", bad_token_ids=bad)).tokens) == "acd"
    assert text_of(run(core, regex("abd", bad_token_ids=bad)).tokens) == "abd"


def test_an_answer_that_is_complete_with_its_first_token_is_the_same_split(
    cores: tuple[Core, Core], core: Core
) -> None:
    for max_tokens, reason in ((1, "length"), (5, "stop")):
        spec = regex("z", max_tokens=max_tokens)
        whole = run(core, spec)
        assert (text_of(whole.tokens), whole.finish_reason) == ("z", reason)
    assert run_split(cores, spec).tokens == whole.tokens
    cores[1].assert_idle()


def test_grammar_with_an_empty_answer_ends_at_prefill(cores: tuple[Core, Core], core: Core) -> None:
    for answer in (run(core, regex("")), run_split(cores, regex(""))):
        assert (answer.tokens, answer.finish_reason, answer.handoff) == ([], "stop", None)


# -- what goes wrong costs its own request only


def test_grammar_with_an_unknown_token_is_refused_and_other_requests_continue(core: Core) -> None:
    params = GuidedDecodingParams(grammar="start: <|no_such_token|>")
    running = core.add(PROMPT, 20)
    answer = run(core, guided(params))
    assert answer.category == "InvalidRequest"
    assert "no_such_token" in (answer.error or "")
    assert len(core.run(running).tokens) == 20


def test_a_grammar_that_needs_a_token_which_the_model_lacks_is_the_callers_fault(
    checkpoints: Checkpoints,
) -> None:
    tokenizer = read_guide_tokenizer(checkpoints())
    guides = Guides(tokenizer, vocab_size=tokens_of("c")[0], end_ids=[EOS, 300])
    guide = guides.start(regex("abb?c?"))
    assert guide is not None
    assert guide.model_ends == (EOS,)
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
        sequence.guide.matcher.consume_token(tokens_of("!")[0])
    [output] = core.step()
    assert (output.request_id, output.error_category) == (request, "InvalidRequest")


def test_a_grammar_is_compiled_once(core: Core) -> None:
    guides = core.engine.guides
    assert isinstance(guides, Guides)
    sampling = regex("q{3}")
    run(core, sampling)
    assert sampling.grammar is not None
    compiled = guides.compiled(sampling.grammar)
    run(core, regex("q{3}", seed=5))
    assert guides.compiled(sampling.grammar) is compiled


def test_a_model_without_an_end_cannot_be_guided(checkpoints: Checkpoints) -> None:
    tokenizer = read_guide_tokenizer(checkpoints())
    with pytest.raises(ConfigError, match=r"guided_decoding_backend: .* end token"):
        Guides(tokenizer, vocab_size=258, end_ids=[300])


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer cannot guide"):
        Guides(GuideTokenizer("{}", 3, EOS), vocab_size=3, end_ids=[])


def test_a_tokenizer_that_is_not_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="guided_decoding_backend: cannot read"):
        read_guide_tokenizer(tmp_path)


#: Looking ahead, llguidance would go on for ever.
NO_END = [
    "start: /a+/ start",
    "start: /a*/ start",
    'start: "aaa" loop\nloop: /a+/ loop',
    "root ::= [a]+ root",
    "start: %lark {\nstart: /a+/ start\n}",
    '%llguidance {"no_forcing": false}\nstart: /a+/ start',
]
TAG = '{"structures": [{"begin": "a", "schema": "start: /a+/ start", "end": "a"}], "triggers": ["a"]}'


@pytest.mark.parametrize(
    "params",
    [*(GuidedDecodingParams(grammar=text) for text in NO_END), GuidedDecodingParams(structural_tag=TAG)],
    ids=[*NO_END, "tag"],
)
def test_a_grammar_that_no_text_ends_goes_on_to_max_tokens(core: Core, params: GuidedDecodingParams) -> None:
    others = tuple(token for token in range(258) if token not in tokens_of("a"))
    answer = run(core, guided(params, max_tokens=5, bad_token_ids=others))
    assert (text_of(answer.tokens), answer.finish_reason) == ("aaaaa", "length")


@pytest.mark.parametrize("grammar", ["start: start", "start: a\na: b\nb: a", 'start: a "x"\na: a'])
def test_a_grammar_that_can_begin_with_nothing_is_refused_in_one_sentence(core: Core, grammar: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        guide_of(core, guided(GuidedDecodingParams(grammar=grammar)))
    assert str(refusal.value) == (
        "guided decoding: no token can begin an answer; is a rule defined by itself alone?"
    )
