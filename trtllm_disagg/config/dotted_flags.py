"""`--trtllm.a.b VALUE`: engine arguments as flags, the way `python -m dynamo.trtllm` takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trtllm_disagg.errors import ConfigError

_PREFIX = "--trtllm."
_OVERRIDE = "--override-engine-args"


def with_dotted_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments, with all that start with --trtllm. as one --override-engine-args. Raises ConfigError."""
    kept: list[str] = []
    nested: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith(_PREFIX):
            kept.append(argument)
            continue
        flag, has_value, value = argument.partition("=")
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value")
            value = rest.pop(0)
        _set(nested, flag, _typed(value))
    if not nested:
        return kept
    if any(argument.split("=", 1)[0] == _OVERRIDE for argument in kept):
        raise ConfigError(f"{_PREFIX}... and {_OVERRIDE} exclude each other; give one of them")
    return [*kept, f"{_OVERRIDE}={json.dumps(nested)}"]


def _set(nested: dict[str, Any], flag: str, value: Any) -> None:
    *way, name = flag.removeprefix(_PREFIX).split(".")
    if not all((*way, name)):
        raise ConfigError(f"{flag} has an empty part; expected {_PREFIX}key or {_PREFIX}group.key")
    owner = nested
    for part in way:
        owner = owner.setdefault(part, {})
        if not isinstance(owner, dict):
            raise ConfigError(f"{flag}: {part} has a value already, so it can have no keys")
    owner[name] = value


def _typed(text: str) -> Any:
    """None, a number, a truth value, or the text itself: what Dynamo makes of it."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
