"""Compiled grammars are kept, but not without a limit to the memory that they take."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest

from tests.support.models import EOS, VOCAB, write_tokenizer
from trtllm_disagg.engines.embedded.guided_decoding.grammar_cache import GrammarCache, heap_bytes
from trtllm_disagg.engines.embedded.guided_decoding.grammars import Matchers, read_guide_tokenizer


@pytest.fixture
def matchers(tmp_path: Path) -> Matchers:
    write_tokenizer(tmp_path)
    return Matchers(read_guide_tokenizer(tmp_path), VOCAB, [EOS])


def regex(pattern: str) -> str:
    return llguidance.grammar_from("regex", pattern)


def multiple_of(number: int) -> str:
    return llguidance.grammar_from("json_schema", json.dumps({"type": "integer", "multipleOf": number}))


def test_a_grammar_is_compiled_once(matchers: Matchers) -> None:
    cache = GrammarCache(matchers.compile)
    assert cache.compiled(regex("a+")) is cache.compiled(regex("a+"))


def test_the_least_recently_used_grammars_go_when_all_take_too_much(matchers: Matchers) -> None:
    # Before and after each compilation: a grammar takes 40 bytes.
    sizes = iter((0, 40, 40, 80, 80, 120))
    cache = GrammarCache(matchers.compile, most_bytes=100, heap_bytes=lambda: next(sizes))
    a, b, c = map(regex, "abc")
    for grammar in (a, b, a, c):
        cache.compiled(grammar)
    assert [grammar in cache for grammar in (a, b, c)] == [True, False, True]


def test_the_newest_grammar_stays_however_much_it_takes(matchers: Matchers) -> None:
    sizes = iter((0, 10, 10, 1000))
    cache = GrammarCache(matchers.compile, most_bytes=100, heap_bytes=lambda: next(sizes))
    small, large = regex("a"), regex("b")
    cache.compiled(small)
    cache.compiled(large)
    assert (small in cache, large in cache) == (False, True)


def test_many_large_grammars_take_no_more_memory_than_allowed(matchers: Matchers) -> None:
    most = 16 << 20
    cache = GrammarCache(matchers.compile, most_bytes=most)
    before = heap_bytes()
    for number in range(20_011, 20_031):
        cache.compiled(multiple_of(number))
    assert heap_bytes() - before <= most + (1 << 20)
    assert multiple_of(20_030) in cache
