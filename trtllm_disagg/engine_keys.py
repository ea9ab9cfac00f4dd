"""Checks one source of engine arguments: an error names the file, the key, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from trtllm_disagg.embedded.llm_args import LlmArgs
from trtllm_disagg.errors import ConfigError


def check_engine_keys(content: object, source: str, strict: bool) -> dict[str, Any]:
    """The content, once every key and type in it was compared with LlmArgs.

    Strict refuses any key that LlmArgs lacks. Otherwise only a misspelling is refused, because TensorRT-LLM
    has more keys than we know; it checks the others itself.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected keys with values, got {type(content).__name__}")
    try:
        # The model has its own flag, so that a file without one is whole.
        LlmArgs.model_validate({"model": "any", **content})
    except ValidationError as errors:
        for error in errors.errors(include_url=False, include_context=False):
            _raise_for(error, content, source, strict)
    return content


def _raise_for(error: Mapping[str, Any], content: dict[str, Any], source: str, strict: bool) -> None:
    path = _path_inside(error["loc"], content)
    key = ".".join(path)
    if error["type"] != "extra_forbidden":
        allowed = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise ConfigError.bad_value(f"{source}: {key or 'content'}", error["input"], allowed)
    hint = _hint(path, strict)
    if hint:
        raise ConfigError(f"{source}: unknown key {key} (value {error['input']!r}); {hint}")


def _path_inside(location: Iterable[Any], content: Any) -> list[str]:
    """The part of pydantic's location that is in the file; pydantic also names the members of a union."""
    path: list[str] = []
    for part in location:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            break
        path.append(str(part))
    return path


def _hint(path: list[str], strict: bool) -> str:
    """What the key should have been; empty where an unknown key may be one of TensorRT-LLM's."""
    known = _known_keys(path[:-1])
    close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6 if strict else 0.9)
    if close:
        return "did you mean " + ".".join([*path[:-1], close[0]]) + "?"
    return "allowed: " + ", ".join(sorted(known)) if strict else ""


def _known_keys(path: list[str]) -> list[str]:
    model: type[BaseModel] = LlmArgs
    for name in path:
        model = _nested_model(model, name)
    return list(model.model_fields)


def _nested_model(model: type[BaseModel], name: str) -> type[BaseModel]:
    annotation = model.model_fields[name].annotation
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    return next(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))
