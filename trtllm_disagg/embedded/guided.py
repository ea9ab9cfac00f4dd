"""Guided decoding in the engine core, by llguidance: a grammar beside a sequence says what may come next.

`Guides` compiles each grammar (grammar.py has the worker's side) once; a `Guide` advances over the tokens
of one choice, wherever they were sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import numpy
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trtllm_disagg.embedded.guide_tokenizer import GuideTokenizer
from trtllm_disagg.embedded.messages import SamplingSpec
from trtllm_disagg.errors import ConfigError, InvalidRequestError

_CACHED_GRAMMARS = 256
_SILENT = 0
#: Else an error carries the parser's state.
_LIMITS = LLParserLimits(verbose_errors=False)
#: llguidance's words that a caller cannot know.
_SENTENCES = {
    "NoExtensionBias": "no token can begin an answer; is a rule of the grammar defined by itself alone?"
}


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
        return _sentence(self._matcher.get_error())


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
        known: Seq[int | None] = end_ids or [tokenizer.eos_token_id]
        # A tokenizer may know more tokens than the model.
        ends = [token for token in known if token is not None and token < vocab_size]
        if not ends:
            raise ConfigError("guided_decoding_backend: neither the model nor its tokenizer has an end token")
        try:
            tokens = LLTokenizer(tokenizer.text, n_vocab=max(vocab_size, tokenizer.size), eos_token=ends)
        except ValueError as error:
            raise ConfigError(f"guided_decoding_backend: the tokenizer cannot guide: {error}") from error
        self._vocab = Vocabulary(tokens, vocab_size, ends)
        self._compiled = functools.lru_cache(maxsize=_CACHED_GRAMMARS)(self._compile)

    def start(self, sampling: SamplingSpec) -> Guide | None:
        """Raises InvalidRequestError for a grammar that does not fit this tokenizer, or is too big."""
        if sampling.grammar is None:
            return None
        shown = sampling.include_stop
        stops = () if shown else tuple(word[0] for word in sampling.stop_words if len(word) == 1)
        matcher = self._compiled(sampling.grammar).deep_copy()
        return Guide(matcher, self._vocab, tuple(dict.fromkeys(sampling.end_ids + stops)))

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._vocab.tokens, grammar, log_level=_SILENT, limits=_LIMITS)
        # Its copies know what it knows by now: the first mask is the dearest.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(f"guided decoding: {_sentence(matcher.get_error())}")
        return matcher


def _sentence(error: str) -> str:
    first = error.strip().partition("\n")[0]
    return _SENTENCES.get(first, first)
