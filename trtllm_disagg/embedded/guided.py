"""Guided decoding in the engine core, by llguidance: a grammar beside a sequence says what may come next.

`Guides` compiles each grammar (grammar.py has the worker's side) once; a `Guide` advances over the tokens
of one choice, wherever they were sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import numpy
import torch
from llguidance import LLMatcher, LLTokenizer

from trtllm_disagg.embedded.guide_tokenizer import GuideTokenizer
from trtllm_disagg.embedded.matchers import Matchers, sentence
from trtllm_disagg.embedded.messages import SamplingSpec
from trtllm_disagg.errors import InvalidRequestError

_CACHED_GRAMMARS = 256


class Guide:
    """`barred` (vocabulary) is True for each token that must not come next."""

    def __init__(self, matcher: LLMatcher, vocab: Vocabulary, enders: Seq[int]) -> None:
        """`enders` end the answer, and so are allowed exactly when the grammar is complete."""
        self._matcher = matcher
        self._vocab = vocab
        self.enders = tuple(enders) or vocab.end_ids
        self._refresh()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The model's own: nothing can follow one of these, even when the request wants to see them."""
        return self._vocab.end_ids

    def advance(self, token: int) -> None:
        """Raises InvalidRequestError for a token that was barred, and when the grammar gets out of hand."""
        if not self._matcher.consume_token(token):
            raise InvalidRequestError(f"guided decoding: token {token} does not fit: {self._reason()}")
        self._refresh()

    def _refresh(self) -> None:
        barred = self._vocab.barred_by(self._matcher)
        if self._matcher.is_error():
            raise InvalidRequestError(f"guided decoding: {self._reason()}")
        barred[self._vocab.end_ids,] = True
        #: Nothing but an end can follow.
        self.exhausted = bool(barred.all())
        if self._matcher.is_accepting():
            barred[self.enders,] = False
        elif self.exhausted:
            raise InvalidRequestError("guided decoding: no token of this model can go on in the grammar")
        self.barred = barred

    def _reason(self) -> str:
        return sentence(self._matcher.get_error())


class Vocabulary:
    """The tokens as llguidance sees them, and the model's row of logits."""

    def __init__(self, tokens: LLTokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        self.tokens = tokens
        self.end_ids = tuple(end_ids)
        self._size = vocab_size
        self._words = numpy.zeros(-(-tokens.vocab_size // 32), dtype=numpy.uint32)

    def barred_by(self, matcher: LLMatcher) -> torch.Tensor:
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        allowed = self._words.view(numpy.uint8)
        barred = numpy.unpackbits(~allowed, count=self._size, bitorder="little")
        return torch.from_numpy(barred.view(numpy.bool_))


class Guides:
    def __init__(self, tokenizer: GuideTokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        """Raises ConfigError for a tokenizer that cannot guide."""
        matchers = Matchers(tokenizer, vocab_size, end_ids)
        self._vocab = Vocabulary(matchers.tokens, vocab_size, matchers.end_ids)
        self._compiled = functools.lru_cache(maxsize=_CACHED_GRAMMARS)(matchers.compile)

    def start(self, sampling: SamplingSpec) -> Guide | None:
        """Raises InvalidRequestError for a grammar that does not fit this tokenizer, or is too big."""
        if sampling.grammar is None:
            return None
        shown = sampling.include_stop
        stops = () if shown else tuple(word[0] for word in sampling.stop_words if len(word) == 1)
        matcher = self._compiled(sampling.grammar).deep_copy()
        return Guide(matcher, self._vocab, tuple(dict.fromkeys(sampling.end_ids + stops)))
