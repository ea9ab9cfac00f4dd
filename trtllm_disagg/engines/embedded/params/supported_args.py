"""What the embedded engine does with the arguments of TensorRT-LLM: serve, refuse, or leave without effect.

A setting that would change an answer is never dropped silently.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.kv_transfer.transports import NOT_BETWEEN_HOSTS, backends
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.model_directory import is_hub_name, model_directory

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

    Args = TypeVar("Args", bound=LlmArgs)


#: Of a release that moved KV between hosts.
_KEY_FILE_VARIABLE = "TRTLLM_DISAGG_TRANSFER_KEY_FILE"


class Served:
    """Marks an argument of which the embedded engine serves these values only."""

    def __init__(self, *values: Any, expected: str = "no value") -> None:
        """Enums by name. `expected`: how an error says so."""
        self._values = values
        self.expected = expected

    def check(self, key: str, value: Any, engine: str = "embedded") -> None:
        """Raises ConfigError for another value."""
        value = value.name if isinstance(value, Enum) else value
        if value not in self._values:
            raise ConfigError.bad_value(key, value, f"{self.expected}, on the {engine} engine")


#: Marks an argument that tunes GPUs, or another runtime: answers are the same without it.
NO_EFFECT = object()


def in_directory(args: Args) -> Args:
    """`args` with the model's directory in place of its name on the hub. Raises ConfigError where there is none."""
    directory = model_directory(str(args.model), "model", args.revision)
    return args.model_copy(update={"model": directory})


def refuse_unsupported(args: LlmArgs) -> list[str]:
    """Raise ConfigError for the first argument that the embedded engine cannot honour.

    Returns the names of the arguments that were set but have no effect here, for one line in the log.
    """
    ignored = check_marks(args)
    _check_kv_dtype(args)
    _check_tokenizer(args)
    _check_ranks(args)
    _check_processors(args)
    _check_backend(args)
    this_cpu()  # refuses a level that there is not
    return ignored


def check_marks(args: LlmArgs, engine: str = "embedded") -> list[str]:
    """`refuse_unsupported`, as far as the arguments' own marks say it."""
    ignored = []
    for key, value, field in _all_arguments(args):
        for mark in field.metadata:
            if isinstance(mark, Served):
                mark.check(key, value, engine)
            elif mark is NO_EFFECT and value != field.get_default(call_default_factory=True):
                ignored.append(key)
    return ignored


def _check_backend(args: LlmArgs) -> None:
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return
    if config.backend not in (allowed := backends()):
        expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}, on the embedded engine"
        raise ConfigError.bad_value("cache_transceiver_config.backend", config.backend, expected)
    if os.environ.get(_KEY_FILE_VARIABLE):
        raise ConfigError(f"{_KEY_FILE_VARIABLE}: {NOT_BETWEEN_HOSTS}; unset it")


def _all_arguments(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """(dotted key, value, field) of each, also inside those that have arguments of their own and are set."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        yield f"{prefix}{name}", value, field
        if isinstance(value, BaseModel):
            yield from _all_arguments(value, f"{prefix}{name}.")


def _check_kv_dtype(args: LlmArgs) -> None:
    """The KV pool has the model's dtype: anything else would quantise."""
    key = "kv_cache_config.dtype"
    allowed = dict.fromkeys(("auto", args.dtype))
    if args.kv_cache_config.dtype not in allowed:
        expected = " or ".join(allowed)
        raise ConfigError.bad_value(key, args.kv_cache_config.dtype, f"{expected}, on the embedded engine")


def _check_tokenizer(args: LlmArgs) -> None:
    """Guided decoding reads the tokenizer in the engine's own process."""
    given = args.tokenizer
    if args.tokenizer_revision is not None and not (isinstance(given, str) and is_hub_name(given)):
        raise ConfigError.bad_value(
            "tokenizer_revision",
            args.tokenizer_revision,
            "no value, without a tokenizer that is a name on the hub, on the embedded engine",
        )
    if args.guided_decoding_backend is not None and not isinstance(given, (str, Path, type(None))):
        raise ConfigError.bad_value(
            "tokenizer",
            type(given).__name__,
            "a directory, with guided_decoding_backend on the embedded engine",
        )


def _check_ranks(args: LlmArgs) -> None:
    if args.tensor_parallel_size > 1 and args.embedded.device == "cuda":
        raise ConfigError.bad_value("embedded.device", "cuda", "cpu, with tensor_parallel_size above 1")


def _check_processors(args: LlmArgs) -> None:
    count = os.cpu_count() or 1
    wanted = args.embedded.cpu_affinity or []
    if strange := [cpu for cpu in wanted if not 0 <= cpu < count]:
        allowed = f"processors of this machine, which are 0 to {count - 1}"
        raise ConfigError.bad_value("embedded.cpu_affinity", strange, allowed)
