"""Reads two engine YAML files, and the flags beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import dropwhile
from typing import Any

from pydantic import ValidationError

from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.engine_args import nearest_key, with_flags
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine.declared_arguments import tensorrt_llm_arguments
from trtllm_disagg.engine.table import ENGINES, TENSORRT_LLM_BACKENDS
from trtllm_disagg.engine.trtllm_version import TrtllmVersion
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.flips import RoleSettings
from trtllm_disagg.worker.model_facts import ModelFacts, read_model_facts
from trtllm_disagg.worker.pairing import Description, Fingerprint

ENGINE = ENGINES["tensorrt_llm"].name
#: Model when no flag names one.
ANY_MODEL = "org/model"
_TRANSCEIVER = "cache_transceiver_config"
_BACKEND = "backend"
#: Default of Dynamo's worker and of this one.
DEFAULT_BLOCK_SIZE = 32

#: The source of a stage without a file.
FLAGS_ONLY = "flags"


def settings_of(
    role: Role, words: Sequence[str], *, strategy: str = "decode_first", schedule_style: str = "context_first"
) -> WorkerConfig:
    """`words`: flags or a full command line of a TensorRT-LLM worker; variables do not count. The other arguments are
    defaults. Raises ConfigError that names doctor's flag and the worker's.
    """
    usual = ["--model", ANY_MODEL, "--disaggregation-mode", role.value, "--disaggregation-strategy", strategy]
    usual += ["--schedule-style", schedule_style]
    flags = list(dropwhile(lambda word: not word.startswith("--"), words))
    try:
        config = parse_worker_flags([*usual, *flags], {}, is_elsewhere=True)
        if config.role is not role:
            raise ConfigError.bad_value("--disaggregation-mode", config.role.value, role.value)
        if config.engine not in ("auto", ENGINE):
            raise ConfigError.bad_value("--engine", config.engine, f"{ENGINE}: doctor knows its rules")
    except ConfigError as error:
        raise ConfigError(f"--{role.value}-flags: {error}") from error
    return replace(config, engine=ENGINE)


@dataclass(frozen=True, slots=True)
class BadKey:
    """A key that TensorRT-LLM refuses, or may not have."""

    key: str
    value: Any
    #: Correct key or value; empty for a key of a newer TensorRT-LLM.
    instead: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One file and its flags. `args` is complete with TensorRT-LLM's defaults."""

    role: Role
    #: The arguments as given.
    given: Mapping[str, Any]
    args: LlmArgs
    bad_keys: tuple[BadKey, ...]
    #: A path, or a name on the hub.
    model: str | None
    facts: ModelFacts
    fingerprint: Fingerprint
    #: From the flags, with the file as `extra_engine_args`.
    config: WorkerConfig
    #: One sentence per flag that the file overrules.
    overruled: tuple[str, ...] = ()
    #: GPUs of this worker; empty if unknown.
    gpus: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The file's name, or `flags`."""
        return self.config.extra_engine_args or FLAGS_ONLY

    def gave(self, *path: str) -> bool:
        """Whether the file or a flag has this key."""
        content: Any = self.given
        for name in path:
            if not isinstance(content, Mapping) or name not in content:
                return False
            content = content[name]
        return True

    @property
    def longest(self) -> int | None:
        """`max_seq_len`, at most the model's, as TensorRT-LLM limits it."""
        limits = self.fingerprint.max_seq_len, self.facts.max_positions
        return min(filter(None, limits), default=None)

    @property
    def arguments(self) -> dict[str, Any]:
        """The given arguments of LLM(...)."""
        return self.args.model_dump(exclude_unset=True) | {"model": self.model}

    @property
    def settings(self) -> RoleSettings:
        """The settings that a live worker would describe."""
        return RoleSettings.of(self.arguments, {})

    @property
    def revision(self) -> str | None:
        """Revision of a model on the hub; None for a directory."""
        if os.path.isdir(os.path.expanduser(self.model or "")):
            return None
        return self.config.revision or self.given.get("revision")

    @property
    def described(self) -> Description:
        """The description that a live worker would publish."""
        return {
            "role": self.role.value,
            "weights": self.model,
            "layout": self.facts.layout,
            "precision": self.facts.precision,
            **self.settings.to_json(),
            **{name: getattr(self.fingerprint, name) for name in Fingerprint.__dataclass_fields__},
        }


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Stage
    decode: Stage
    trtllm_version: TrtllmVersion
    environ: Mapping[str, str]
    #: At the router; None: not given.
    kv_block_size: int | None = None

    @property
    def stages(self) -> tuple[Stage, Stage]:
        return self.prefill, self.decode

    @property
    def strategy(self) -> str:
        return self.prefill.config.strategy

    @property
    def schedule_style(self) -> ScheduleStyle:
        return self.prefill.config.schedule_style


def stage_of(
    config: WorkerConfig,
    source: str,
    from_file: Mapping[str, Any],
    version: TrtllmVersion,
    environ: Mapping[str, str],
    model: str | None = None,
    gpus: tuple[str, ...] = (),
) -> Stage:
    """`source`: name of the file; empty without one."""
    config = replace(config, extra_engine_args=source)
    given, overruled = with_flags(from_file, config)
    args, bad_keys, readable = _validated(given)
    named = None if config.model == ANY_MODEL else config.model
    own_model = named or readable.get("model") or model
    facts = read_model_facts(own_model or "")
    block_size = args.kv_cache_config.tokens_per_block
    of_worker = readable | {_TRANSCEIVER: _transceiver(args, given), "max_seq_len": args.max_seq_len}
    fingerprint = Fingerprint.of(ENGINE, of_worker, block_size, facts, str(version), environ)
    own = own_model, facts, fingerprint, config, tuple(overruled), gpus
    return Stage(config.role, given, args, bad_keys, *own)


def _transceiver(args: LlmArgs, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The default transceiver, unless the file disables it."""
    if args.cache_transceiver_config is not None:
        return args.cache_transceiver_config.model_dump(exclude_unset=True)
    return None if _TRANSCEIVER in given else {_BACKEND: "DEFAULT"}


def _validated(given: Mapping[str, Any]) -> tuple[LlmArgs, tuple[BadKey, ...], dict[str, Any]]:
    """Splits `given` into valid arguments, the keys that TensorRT-LLM refuses, and the values of the right types."""
    readable = _copied(given)
    found = [*_wrong_types(readable)]
    left = _copied(readable)
    found += _upper_backend(left)
    while True:
        try:
            return LlmArgs.model_validate({"model": "any"} | left), tuple(found), readable
        except ValidationError as errors:
            refused = errors.errors(include_url=False, include_context=False)
            if not any(error["loc"] and str(error["loc"][0]) in left for error in refused):
                # The error concerns the whole content: check no further.
                left, readable = {}, {}
                found.append(_bad_key([], refused[0]))
            for error in refused:
                path = _take_out(left, [str(part) for part in error["loc"]])
                if not path:  # already removed with another error
                    continue
                bad = _bad_key(path, error)
                if error["type"] != "extra_forbidden":
                    _take_out(readable, path)
                if bad.key not in _arguments_of_tensorrt_llm():
                    found.append(bad)


def _wrong_types(readable: dict[str, Any]) -> Iterator[BadKey]:
    """Removes wrongly typed values that doctor reads and `LlmArgs` does not check."""
    kinds: dict[str, tuple[type, str]] = {
        "model": (str, "a path or a name"),
        "revision": (str, "a text"),
        "speculative_config": (dict, "keys with values"),
    }
    for key, (kind, allowed) in kinds.items():
        value = readable.get(key)
        if value is not None and not isinstance(value, kind):
            del readable[key]
            yield BadKey(key, value, allowed)


@cache
def _arguments_of_tensorrt_llm() -> frozenset[str]:
    """All argument names of LLM(...), even those that the embedded engine lacks."""
    return frozenset(tensorrt_llm_arguments().model_fields.keys() - LlmArgs.model_fields.keys())


def _upper_backend(left: dict[str, Any]) -> list[BadKey]:
    """TensorRT-LLM accepts backend names in upper case only, since 1.1."""
    transceiver = left.get(_TRANSCEIVER)
    if not isinstance(transceiver, dict):
        return []
    backend = transceiver.get(_BACKEND)
    if not isinstance(backend, str) or backend in TENSORRT_LLM_BACKENDS:
        return []
    is_spelling = backend.upper() in TENSORRT_LLM_BACKENDS
    transceiver[_BACKEND] = backend.upper() if is_spelling else "DEFAULT"
    allowed = backend.upper() if is_spelling else f"one of {', '.join(TENSORRT_LLM_BACKENDS)}"
    return [BadKey(f"{_TRANSCEIVER}.{_BACKEND}", backend, allowed)]


def _take_out(content: dict[str, Any], location: Sequence[str]) -> list[str]:
    """Removes the wrong part, and returns its path; empty if absent."""
    path, owners = list[str](), [content]
    for part in location:
        if not isinstance(owners[-1], dict) or part not in owners[-1]:
            break
        path.append(part)
        owners.append(owners[-1][part])
    if path:
        del owners[-2][path[-1]]
    return path


def _bad_key(path: list[str], error: Mapping[str, Any]) -> BadKey:
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return BadKey(key, error["input"], nearest_key(LlmArgs, path))
    allowed = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return BadKey(key or "the file", error["input"], allowed)


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _copied(value) if isinstance(value, Mapping) else value for key, value in content.items()
    }
