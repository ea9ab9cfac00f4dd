"""Which guides of a request can guide: `guided_json` and its like, as Dynamo's frontend forwards them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trtllm_disagg.errors import InvalidRequestError


class _Guide(NamedTuple):
    accepts: Callable[[Any], bool]
    allowed: str


def require_guides(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError, naming the field, for a guide that is empty or of the wrong type: to leave it out
    would answer with any text. None is no guide. An empty list of choices never comes here: the frontend drops it.
    """
    for name, guide in _GUIDES.items():
        value = given.get(name)
        if value is not None and not guide.accepts(value):
            raise InvalidRequestError(
                f"guided_{name}: {str(value)[:100]!r} is not allowed; expected {guide.allowed}"
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


#: By name in `sampling_options.guided_decoding`. An empty schema is one: any JSON.
_GUIDES = {
    "json": _Guide(
        lambda value: isinstance(value, dict) or value is True or _is_text(value), "a JSON schema"
    ),
    "regex": _Guide(_is_text, "a regular expression that is not empty"),
    "grammar": _Guide(_is_text, "a grammar that is not empty"),
    "choice": _Guide(
        lambda value: (
            isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)
        ),
        "a list of texts, at least one",
    ),
    "json_object": _Guide(lambda value: isinstance(value, bool), "true or false"),
    "structural_tag": _Guide(
        lambda value: (isinstance(value, dict) and bool(value)) or _is_text(value), "an object"
    ),
}
