"""Grammars, compiled by llguidance for one model's tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trtllm_disagg.embedded.guide_tokenizer import GuideTokenizer
from trtllm_disagg.errors import ConfigError, InvalidRequestError

_SILENT = 0
#: Else an error carries the parser's state.
_LIMITS = LLParserLimits(verbose_errors=False)
#: llguidance's words that a caller cannot know.
_SENTENCES = {
    "NoExtensionBias": "no token can begin an answer; is a rule of the grammar defined by itself alone?"
}


class Matchers:
    def __init__(self, tokenizer: GuideTokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Raises ConfigError for a tokenizer that cannot guide."""
        known: Sequence[int | None] = end_ids or [tokenizer.eos_token_id]
        # A tokenizer may know more tokens than the model.
        self.end_ids = [token for token in known if token is not None and token < vocab_size]
        if not self.end_ids:
            raise ConfigError("guided_decoding_backend: neither the model nor its tokenizer has an end token")
        try:
            self.tokens = LLTokenizer(
                tokenizer.text, n_vocab=max(vocab_size, tokenizer.size), eos_token=self.end_ids
            )
        except ValueError as error:
            raise ConfigError(f"guided_decoding_backend: the tokenizer cannot guide: {error}") from error

    def compile(self, grammar: str) -> LLMatcher:
        """Raises InvalidRequestError for a grammar that does not fit this tokenizer, or is too big."""
        matcher = LLMatcher(self.tokens, grammar, log_level=_SILENT, limits=_LIMITS)
        # Its copies know what it knows by now: the first mask is the dearest.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(f"guided decoding: {sentence(matcher.get_error())}")
        return matcher


def sentence(error: str) -> str:
    """What llguidance says, for a caller."""
    first = error.strip().partition("\n")[0]
    return _SENTENCES.get(first, first)
