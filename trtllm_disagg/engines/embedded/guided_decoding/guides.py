"""Guided decoding in the engine core, by llguidance: a grammar beside a sequence says what may come next.

`Guides` compiles each grammar (grammars.py) once; a `Guide` advances over the tokens
of one choice, wherever they were sampled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import torch
from llguidance import LLMatcher

from trtllm_disagg.engines.embedded.guided_decoding.grammars import GuideTokenizer, Matchers, sentence
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.errors import InvalidRequestError

#: Compiled and kept for the next request with the same grammar; a large one takes 40 MB.
_KEPT_GRAMMARS = 16


class Guide:
    """`barred` (vocabulary) is True for each token that must not come next."""

    def __init__(self, matcher: LLMatcher, matchers: Matchers, allowed_ends: Seq[int]) -> None:
        """`allowed_ends` end the answer, and so are allowed exactly when the grammar is complete."""
        self.matcher = matcher
        self._matchers = matchers
        self.allowed_ends = tuple(allowed_ends) or matchers.end_ids
        self._refresh()

    @property
    def model_ends(self) -> tuple[int, ...]:
        """The model's own: nothing can follow one of these, even when the request wants to see them."""
        return self._matchers.end_ids

    def advance(self, token: int) -> None:
        """Raises InvalidRequestError for a token that was barred, and when the grammar gets out of hand."""
        if not self.matcher.consume_token(token):
            raise InvalidRequestError(f"guided decoding: token {token} does not fit: {self._reason()}")
        self._refresh()

    def _refresh(self) -> None:
        barred = torch.from_numpy(self._matchers.forbidden_tokens(self.matcher))
        if self.matcher.is_error():
            raise InvalidRequestError(f"guided decoding: {self._reason()}")
        barred[self._matchers.end_ids,] = True
        #: Nothing but an end can follow.
        self.exhausted = bool(barred.all())
        if self.matcher.is_accepting():
            barred[self.allowed_ends,] = False
        elif self.exhausted:
            raise InvalidRequestError("guided decoding: no token of this model can go on in the grammar")
        self.barred = barred

    def _reason(self) -> str:
        return sentence(self.matcher.get_error())


class Guides:
    def __init__(self, tokenizer: GuideTokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        """Raises ConfigError for a tokenizer that cannot guide."""
        self._matchers = Matchers(tokenizer, vocab_size, end_ids)
        self.compiled = functools.lru_cache(maxsize=_KEPT_GRAMMARS)(self._matchers.compile)

    def start(self, sampling: SamplingSpec) -> Guide | None:
        """Raises InvalidRequestError for a grammar that does not fit this tokenizer, or is too big."""
        if sampling.grammar is None:
            return None
        shown = sampling.include_stop
        stops = () if shown else tuple(word[0] for word in sampling.stop_words if len(word) == 1)
        matcher = self.compiled(sampling.grammar).deep_copy()
        return Guide(matcher, self._matchers, tuple(dict.fromkeys(sampling.end_ids + stops)))
