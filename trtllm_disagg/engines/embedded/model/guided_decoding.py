"""Guided decoding by llguidance. The worker turns GuidedDecodingParams into a grammar; the engine core compiles it for
the model's tokens, and restricts each sequence's next token by it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from tokenizers import Tokenizer

from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.params.request_params import GuidedDecodingParams
from trtllm_disagg.errors import ConfigError, InvalidRequestError

_CACHED_CHECKS = 256
#: llguidance looks ahead for forced text, endlessly if a rule is endless: `/a+/ start`. Set in one grammar, this covers
#: all that it refers to; the last setting counts.
_NO_LOOKING_AHEAD = '\n%llguidance {"no_forcing": true}\n'
#: json.dumps' layout: with free white space, a small model could write it without end.
_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Also in a schema inside Lark, or quoted in a list of grammars.
_MULTIPLE_OF = re.compile(r"multipleOf[\\\"\s]*:(?:\s|\\+[nrt])*-?([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_ESCAPED = re.compile(r"\\+u00([2-7][0-9a-fA-F])")
#: llguidance makes a state of each remainder, without a limit: 0.4 s and 40 MB for this number.
_MAX_REMAINDERS = 100_000
#: Number of compiled grammars kept for later requests.
_KEPT_GRAMMARS = 16
_SILENT = 0
#: Verbose errors carry the parser's state.
_LIMITS = LLParserLimits(verbose_errors=False)
#: For cryptic errors of llguidance.
_EXPLANATIONS = {"NoExtensionBias": "no token can begin an answer; is a rule defined by itself alone?"}


def grammar_of(params: GuidedDecodingParams) -> str | None:
    """None if no option is set. Raises ValueError naming the option and its fault."""
    for option, make in _MAKERS.items():
        given = getattr(params, option)
        if given is None or given is False:
            continue
        try:
            grammar = make(given)
            _check(grammar)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"SamplingParams.guided_decoding.{option}: {error}") from None
        return grammar
    return None


@functools.lru_cache(maxsize=_CACHED_CHECKS)
def _check(grammar: str) -> None:
    if _remainders(grammar) > _MAX_REMAINDERS:
        raise ValueError(f"the least common multiple of all multipleOf is above {_MAX_REMAINDERS} steps")
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(messages[0].strip())


def _remainders(grammar: str) -> int:
    """States of a number that is a multiple of all, as `allOf` or a reference may require."""
    plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), grammar)
    divisors = [Decimal(repr(float(found))).normalize() for found in _MULTIPLE_OF.findall(plain)]
    if not all(divisor.is_finite() for divisor in divisors):
        return _MAX_REMAINDERS + 1
    digits = max((-int(divisor.as_tuple().exponent) for divisor in divisors), default=0)
    return math.lcm(*(int(Fraction(divisor) * 10 ** max(0, digits)) for divisor in divisors))


def _from_json(schema: Any) -> str:
    """`schema`: text, a dict, or a pydantic model."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        schema = json.loads(schema)
    return LLMatcher.grammar_from_json_schema({} if schema is True else schema, defaults=_LAYOUT)


def _from_grammar(text: str) -> str:
    """`text`: llguidance's Lark, or GBNF."""
    return llguidance.grammar_from("grammar", text) + _NO_LOOKING_AHEAD


def _from_structural_tag(text: str) -> str:
    """TensorRT-LLM's form: structures (begin, schema, end), each begun by one of the triggers."""
    tag = json.loads(text)
    if not isinstance(tag, dict) or not tag.get("structures") or not tag.get("triggers"):
        raise ValueError("llguidance needs `structures` (begin, schema, end) and `triggers`")
    grammar = StructTag.to_grammar([_structure(item, tag["triggers"]) for item in tag["structures"]])
    if not grammar.startswith("{"):
        return grammar + _NO_LOOKING_AHEAD
    # A schema may be Lark: then a list of grammars, the tags' first.
    several = json.loads(grammar)
    several["grammars"][0]["lark_grammar"] += _NO_LOOKING_AHEAD
    return json.dumps(several)


def _structure(item: Any, triggers: Seq[str]) -> StructTag:
    if not isinstance(item, dict):
        raise ValueError(f"{item!r} in `structures` is not an object")
    begin = str(item.get("begin") or "")
    trigger = next((t for t in triggers if t and begin.startswith(t)), None)
    if trigger is None:
        raise ValueError(f"begin {begin!r} does not start with one of the triggers {list(triggers)}")
    return StructTag(
        trigger=trigger, begin=begin, grammar=item.get("schema") or {}, end=str(item.get("end") or "")
    )


#: By field of GuidedDecodingParams.
_MAKERS: dict[str, Callable[[Any], str]] = {
    "json": _from_json,
    "json_object": lambda _: _from_json({"type": "object"}),
    "regex": functools.partial(llguidance.grammar_from, "regex"),
    "grammar": _from_grammar,
    "structural_tag": _from_structural_tag,
}


@dataclass(frozen=True, slots=True)
class GuideTokenizer:
    """A model's tokenizer, as guided decoding needs it."""

    #: As in a tokenizer.json.
    text: str
    #: Number of tokens, added ones included.
    size: int
    eos_token_id: int | None


def read_guide_tokenizer(directory: Path) -> GuideTokenizer:
    """Raises ConfigError for a tokenizer that cannot guide."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(
            f"guided_decoding_backend: cannot read the tokenizer of {directory}: {error}"
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"guided_decoding_backend: {directory} has a slow tokenizer; a tokenizer.json is needed"
        )
    pieces = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    # llguidance tokenizes pieces of text.
    pieces.no_padding()
    pieces.no_truncation()
    return GuideTokenizer(pieces.to_str(), len(tokenizer), tokenizer.eos_token_id)


class Guides:
    """Grammars compiled for one model's tokens, and the tokens that they bar."""

    def __init__(self, tokenizer: GuideTokenizer, vocab_size: int, end_ids: Seq[int]) -> None:
        """Raises ConfigError for a tokenizer that cannot guide."""
        known: Seq[int | None] = end_ids or [tokenizer.eos_token_id]
        # A tokenizer may know more tokens than the model.
        self.end_ids = tuple(token for token in known if token is not None and token < vocab_size)
        if not self.end_ids:
            raise ConfigError("guided_decoding_backend: neither the model nor its tokenizer has an end token")
        try:
            self._tokens = LLTokenizer(
                tokenizer.text, n_vocab=max(vocab_size, tokenizer.size), eos_token=list(self.end_ids)
            )
        except ValueError as error:
            raise ConfigError(f"guided_decoding_backend: the tokenizer cannot guide: {error}") from error
        self._size = vocab_size
        self._words = np.zeros(-(-self._tokens.vocab_size // 32), dtype=np.uint32)
        self.compiled = functools.lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)

    def start(self, sampling: SamplingSpec) -> Guide | None:
        """Raises InvalidRequestError for a grammar that does not fit this tokenizer, or is too big."""
        if sampling.grammar is None:
            return None
        shown = sampling.include_stop
        stops = () if shown else tuple(word[0] for word in sampling.stop_words if len(word) == 1)
        matcher = self.compiled(sampling.grammar).deep_copy()
        return Guide(matcher, self, tuple(dict.fromkeys(sampling.end_ids + stops)))

    def _compile(self, grammar: str) -> LLMatcher:
        """Raises InvalidRequestError for a grammar that does not fit this tokenizer, or is too big."""
        matcher = LLMatcher(self._tokens, grammar, log_level=_SILENT, limits=_LIMITS)
        # Copies share this mask: the first one takes longest.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(f"guided decoding: {sentence(matcher.get_error())}")
        return matcher

    def forbidden_tokens(self, matcher: LLMatcher) -> np.ndarray:
        """(vocabulary) bool: True for each token that must not come next."""
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        allowed = self._words.view(np.uint8)
        barred = np.unpackbits(~allowed, count=self._size, bitorder="little")
        return barred.view(np.bool_)


def sentence(error: str) -> str:
    """llguidance's error as a sentence for the client."""
    first = error.strip().partition("\n")[0]
    return _EXPLANATIONS.get(first, first)


class Guide:
    """`barred` (vocabulary) is True for each token that must not come next."""

    def __init__(self, matcher: LLMatcher, guides: Guides, allowed_ends: Seq[int]) -> None:
        """`allowed_ends` end the answer; they are allowed exactly when the grammar is complete."""
        self.matcher = matcher
        self._guides = guides
        self.allowed_ends = tuple(allowed_ends) or guides.end_ids
        self._refresh()

    @property
    def model_ends(self) -> tuple[int, ...]:
        """The model's end tokens: nothing can follow them, even if the request wants to see them."""
        return self._guides.end_ids

    def advance(self, token: int) -> None:
        """Raises InvalidRequestError for a barred token, or a grammar that exceeds its limits."""
        if not self.matcher.consume_token(token):
            raise InvalidRequestError(f"guided decoding: token {token} does not fit: {self._reason()}")
        self._refresh()

    def _refresh(self) -> None:
        barred = self._guides.forbidden_tokens(self.matcher)
        if self.matcher.is_error():
            raise InvalidRequestError(f"guided decoding: {self._reason()}")
        barred[list(self._guides.end_ids)] = True
        #: Only an end can follow.
        self.exhausted = bool(barred.all())
        if self.matcher.is_accepting():
            barred[list(self.allowed_ends)] = False
        elif self.exhausted:
            raise InvalidRequestError("guided decoding: no token of this model can continue the grammar")
        self.barred = barred

    def _reason(self) -> str:
        return sentence(self.matcher.get_error())
