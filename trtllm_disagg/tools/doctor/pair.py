"""Reads two engine YAML files and the flags beside them, for the rules."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import dropwhile
from typing import Any

from pydantic import ValidationError

from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.engine_args import nearest_key, with_flags
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engines import ENGINES, TENSORRT_LLM_BACKENDS
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, TrtllmVersion
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.flips import RoleSettings
from trtllm_disagg.worker.model_facts import ModelFacts, read_model_facts
from trtllm_disagg.worker.pairing import Description, Fingerprint

ENGINE = ENGINES["tensorrt_llm"].name
#: Of a worker without a flag that names one.
ANY_MODEL = "org/model"
_TRANSCEIVER = "cache_transceiver_config"
_BACKEND = "backend"
#: As Dynamo's worker has it, and this one.
DEFAULT_BLOCK_SIZE = 32

#: The source of a side that has no file.
FLAGS_ONLY = "flags"


def settings_of(
    role: Role, words: Sequence[str], *, strategy: str = "decode_first", schedule_style: str = "context_first"
) -> WorkerConfig:
    """`words`: flags, or a whole command line, of a worker on TensorRT-LLM; no variables. What it leaves open is as the
    other arguments say. Raises ConfigError, naming doctor's flag and the worker's.
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
    """A key that TensorRT-LLM would refuse, or that may not exist."""

    key: str
    value: Any
    #: The correct key or value; empty for a key that a newer TensorRT-LLM may have.
    instead: str


@dataclass(frozen=True, slots=True)
class Side:
    """One file, and the flags beside it. `args` has TensorRT-LLM's defaults where they say nothing."""

    role: Role
    #: The arguments as given in the file and the flags.
    given: Mapping[str, Any]
    args: LlmArgs
    bad_keys: tuple[BadKey, ...]
    #: The path or the name of the model.
    model: str | None
    facts: ModelFacts
    fingerprint: Fingerprint
    #: The configuration from its flags, with the file as `extra_engine_args`.
    config: WorkerConfig
    #: A sentence for each flag that the file overrules.
    overruled: tuple[str, ...] = ()
    #: The GPUs of this worker; empty where unknown.
    gpus: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The name of its file, for the reader."""
        return self.config.extra_engine_args or FLAGS_ONLY

    def gave(self, *path: str) -> bool:
        """Whether the file or a flag sets this key."""
        content: Any = self.given
        for name in path:
            if not isinstance(content, Mapping) or name not in content:
                return False
            content = content[name]
        return True

    @property
    def max_seq_len(self) -> int | None:
        return self.fingerprint.max_seq_len

    @property
    def longest(self) -> int | None:
        """`max_seq_len` as TensorRT-LLM takes it: at most the model's."""
        return min((each for each in (self.max_seq_len, self.facts.max_positions) if each), default=None)

    @property
    def settings(self) -> RoleSettings:
        """Those that are given, as a live worker describes them."""
        return RoleSettings.of(self.args.model_dump(exclude_unset=True), {})

    @property
    def num_gpus(self) -> int:
        return self.settings.num_gpus

    @property
    def revision(self) -> str | None:
        """The revision of a model on the hub; None for a directory."""
        if os.path.isdir(os.path.expanduser(self.model or "")):
            return None
        return self.config.revision or self.given.get("revision")

    @property
    def described(self) -> Description:
        """The engine's description, as a live worker has it."""
        return {
            "role": self.role.value,
            "weights": self.model,
            "layout": self.facts.layout,
            "precision": self.facts.precision,
            **self.settings.to_json(),
            **{name: getattr(self.fingerprint, name) for name in Fingerprint.__dataclass_fields__},
        }


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """What is asked about besides the two files."""

    trtllm_version: TrtllmVersion = NEWEST_KNOWN
    strategy: str = "decode_first"
    schedule_style: str = "context_first"
    #: None where it was not given.
    kv_block_size: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Side
    decode: Side
    deployment: PlannedDeployment

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that prefill takes."""
        return self.prefill.longest


def side_of(
    role: Role,
    source: str,
    from_file: Mapping[str, Any],
    model: str | None,
    deployment: PlannedDeployment,
    gpus: tuple[str, ...] = (),
    config: WorkerConfig | None = None,
) -> Side:
    """`source`: the name of the file; empty where there is none."""
    config = config or settings_of(
        role, (), strategy=deployment.strategy, schedule_style=deployment.schedule_style
    )
    config = replace(config, extra_engine_args=source)
    given, overruled = with_flags(from_file, config)
    args, bad_keys, readable = _validated(given)
    named = None if config.model == ANY_MODEL else config.model
    own_model = named or readable.get("model") or model
    facts = read_model_facts(own_model or "")
    block_size = args.kv_cache_config.tokens_per_block
    of_worker = readable | {_TRANSCEIVER: _transceiver(args, given), "max_seq_len": args.max_seq_len}
    fingerprint = Fingerprint.of(
        ENGINE, of_worker, block_size, facts, str(deployment.trtllm_version), deployment.environ
    )
    return Side(role, given, args, bad_keys, own_model, facts, fingerprint, config, tuple(overruled), gpus)


def _transceiver(args: LlmArgs, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """A worker of a pair has one unless its file says that it has none."""
    if args.cache_transceiver_config is not None:
        return args.cache_transceiver_config.model_dump()
    return None if _TRANSCEIVER in given else {_BACKEND: "DEFAULT"}


def _validated(given: Mapping[str, Any]) -> tuple[LlmArgs, tuple[BadKey, ...], dict[str, Any]]:
    """The arguments without what TensorRT-LLM would refuse, that, and `given` without what is of a wrong type."""
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
                # The error concerns the whole content, so nothing of it can be checked further.
                left, readable = {}, {}
                found.append(_bad_key([], refused[0]))
            for error in refused:
                path = _take_out(left, [str(part) for part in error["loc"]])
                if not path:  # went with another error
                    continue
                bad = _bad_key(path, error)
                if error["type"] != "extra_forbidden":
                    _take_out(readable, path)
                if bad.key not in _arguments_of_tensorrt_llm():
                    found.append(bad)


def _wrong_types(readable: dict[str, Any]) -> Iterator[BadKey]:
    """Removes from `readable` wrongly typed values that doctor reads and `LlmArgs` does not check."""
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
    """All argument names of LLM(...); `LlmArgs` lacks those that the embedded engine does not use."""
    pins = files("trtllm_disagg.engines.recording") / "llm_api"
    names: set[str] = set()
    for version, kind in (("1.3.0rc", "fields"), ("1.3.0rc29", "names")):
        names.update(json.loads((pins / f"{version}.json").read_text())["classes"]["LlmArgs"][kind])
    return frozenset(names - LlmArgs.model_fields.keys())


def _upper_backend(left: dict[str, Any]) -> list[BadKey]:
    """Since 1.1, TensorRT-LLM accepts names of backends in upper case only."""
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
    """Remove the wrong part, and return its path, which is empty if it was not there."""
    path, owner = [], content
    for part in location:
        if not isinstance(owner, dict) or part not in owner:
            break
        path.append(part)
        owner = owner[part]
    if path:
        owner = content
        for part in path[:-1]:
            owner = owner[part]
        owner.pop(path[-1])
    return path


def _bad_key(path: list[str], error: Mapping[str, Any]) -> BadKey:
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return BadKey(key, error["input"], nearest_key(path))
    allowed = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return BadKey(key or "the file", error["input"], allowed)


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _copied(value) if isinstance(value, Mapping) else value for key, value in content.items()
    }
