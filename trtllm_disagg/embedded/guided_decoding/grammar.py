"""GuidedDecodingParams -> one grammar text, as llguidance writes it. Needs no torch and no tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import llguidance
from llguidance import LLMatcher, StructTag

from trtllm_disagg.embedded.params.request_params import GuidedDecodingParams

_CACHED_CHECKS = 256
#: llguidance looks ahead for text that nothing else can replace, which has no end where a rule has none: `/a+/ start`.
#: One grammar that says so is enough for all that it refers to, and the last word counts.
_NO_LOOKING_AHEAD = '\n%llguidance {"no_forcing": true}\n'


def grammar_of(params: GuidedDecodingParams) -> str | None:
    """None when no option is set. Raises ValueError naming the option and what is wrong with it."""
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
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise ValueError(messages[0].strip())


def _from_json(schema: Any) -> str:
    """A schema as text, as a dict, or as a pydantic model."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        schema = json.loads(schema)
    return llguidance.grammar_from("json_schema", json.dumps(schema))


def _from_grammar(text: str) -> str:
    """Lark, as llguidance has it, or GBNF."""
    return llguidance.grammar_from("grammar", text) + _NO_LOOKING_AHEAD


def _from_structural_tag(text: str) -> str:
    """TensorRT-LLM's form: structures (begin, schema, end), each begun by one of the triggers."""
    tag = json.loads(text)
    if not isinstance(tag, dict) or not tag.get("structures") or not tag.get("triggers"):
        raise ValueError("llguidance needs `structures` (begin, schema, end) and `triggers`")
    grammar = StructTag.to_grammar([_structure(item, tag["triggers"]) for item in tag["structures"]])
    if not grammar.startswith("{"):
        return grammar + _NO_LOOKING_AHEAD
    # Some schemas are Lark: a list of grammars, which begins with the one of the tags.
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
