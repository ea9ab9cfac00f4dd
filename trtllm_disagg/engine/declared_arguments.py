"""TensorRT-LLM's declared arguments of LLM(...) as data: names, types, limits and sections.

scripts/pin_llm_api.py reads them from each version into `pins/VERSION.json`. pydantic checks a file with them, so that
a wrong key or value is named before importing TensorRT-LLM, which takes most of a minute.
"""

from __future__ import annotations

import builtins
import json
import pathlib
import typing
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, create_model

#: The version that could be read completely, then newer ones for their additional names.
_VERSIONS = ("1.3.0rc", "1.3.0rc29", "1.4.0rc4")

#: Fields that TensorRT-LLM declares as any number, but refuses below 1, or below 0, while loading.
_POSITIVE = """
    LlmArgs.tensor_parallel_size LlmArgs.pipeline_parallel_size LlmArgs.context_parallel_size LlmArgs.gpus_per_node
    LlmArgs.max_batch_size LlmArgs.max_input_len LlmArgs.max_seq_len LlmArgs.max_beam_width LlmArgs.max_num_tokens
    KvCacheConfig.max_tokens KvCacheConfig.tokens_per_block
"""
_NOT_NEGATIVE = (
    "LlmArgs.num_postprocess_workers KvCacheConfig.host_cache_size KvCacheConfig.event_buffer_max_size"
)
_NARROWER = {name: {"gt": 0} for name in _POSITIVE.split()} | {
    name: {"ge": 0} for name in _NOT_NEGATIVE.split()
}


def power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("Input should be a power of two")
    return value


def load_format(value: Any) -> Any:
    names = [name for name in typing.get_args(_TYPES["LoadFormat"]) if isinstance(name, str)]
    if isinstance(value, str) and value.upper() not in names:
        raise ValueError(f"Input should be one of {', '.join(names).lower()}")
    return value


def python_needs_nixl(value: str | None, others: ValidationInfo) -> str | None:
    """Of transceiver_runtime."""
    backend = others.data.get("backend")
    if value == "PYTHON" and backend not in (None, "DEFAULT", "NIXL"):
        raise ValueError(f"CPP or auto with backend {backend}; PYTHON needs NIXL")
    return value


def python_needs_an_end(value: int | None, others: ValidationInfo) -> int | None:
    """Of kv_transfer_timeout_ms."""
    if value is None and others.data.get("transceiver_runtime") == "PYTHON":
        raise ValueError("a finite kv_transfer_timeout_ms with transceiver_runtime PYTHON")
    return value


#: Field -> its check.
_CHECKS: Mapping[str, Any] = {
    "tokens_per_block": power_of_two,
    "load_format": load_format,
    "transceiver_runtime": python_needs_nixl,
    "kv_transfer_timeout_ms": python_needs_an_end,
}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@cache
def _pin(version: str) -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads((files(__package__) / "pins" / f"{version}.json").read_text())
    return read


class _Types(dict[str, Any]):
    """Name in an annotation -> its type, made at first use."""

    def __missing__(self, name: str) -> Any:
        pin, modules = _pin(_VERSIONS[0]), (builtins, typing, pydantic, pathlib)
        if name in pin["types"]:
            made = self._read(pin["types"][name])
        elif name in pin["classes"]:
            made = self._section(name, pin["classes"][name].get("limits", {}))
        elif name.endswith(("Config", "ConfigType")):  # an unpinned section
            made = dict[str, Any]
        else:
            made = next((getattr(each, name) for each in modules if hasattr(each, name)), Any)
        self[name] = made
        return made

    def _read(self, annotation: str) -> Any:
        return eval(annotation, {}, self)

    def _section(self, name: str, limits: Mapping[str, Any]) -> type[BaseModel]:
        fields: dict[str, Any] = {}
        for field, annotation in _annotations(name).items():
            kind = self._read(annotation)
            if (check := _CHECKS.get(field)) is not None:
                kind = Annotated[kind, AfterValidator(check)]
            limited = limits.get(field) or _NARROWER.get(f"{name}.{field}", {})
            fields[field] = kind, Field(default=None, **limited)
        made: type[BaseModel] = create_model(name, __base__=_Section, **fields)
        return made


def _annotations(name: str) -> dict[str, str]:
    """Field of a class -> its written type in the first version that has it; Any if only the name is known."""
    found: dict[str, str] = {}
    for version in _VERSIONS:
        pinned = _pin(version)["classes"].get(name, {})
        names = dict.fromkeys(pinned.get("names", ()), "Any")
        found = names | {field: kind for field, (kind, _) in pinned.get("fields", {}).items()} | found
    return found


_TYPES = _Types()


def tensorrt_llm_arguments() -> type[BaseModel]:
    """TensorRT-LLM's known arguments; another version may have more."""
    declared: type[BaseModel] = _TYPES["LlmArgs"]
    return declared
