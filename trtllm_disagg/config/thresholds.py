"""What deciders and admission compare with. `--policy-file` or a command changes it while a worker runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from trtllm_disagg.config.deciders import Rule
from trtllm_disagg.config.worker_config import DECIDER_THRESHOLDS, WorkerConfig, check_value
from trtllm_disagg.config.yaml_file import read_yaml
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)


#: Those that every worker has a use for; the others are a decider's.
ADMISSION = ("max_queued_requests", "max_queued_tokens")
#: Of a worker that calls another one, as the deciders' are.
FALLBACK_BUDGET = ("max_local_fallbacks", "max_local_fallback_tokens")
NAMES = (*DECIDER_THRESHOLDS, *FALLBACK_BUDGET, *ADMISSION)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Tokens, requests and a share, by their names as settings: one number for each of NAMES."""

    values: Mapping[str, int | float]

    @classmethod
    def of(cls, config: WorkerConfig) -> Thresholds:
        given = {name: value for name in NAMES if (value := config.value_of(name)) is not None}
        return cls(_bounds(config) | given)

    def __getitem__(self, name: str) -> int:
        """Of those that every worker has: ADMISSION and FALLBACK_BUDGET."""
        return int(self.values[name])

    def rule(self, kind: type[Rule]) -> Rule:
        """A decider's rule that compares with these."""
        return replace(kind(), **{threshold.name: self.values[threshold.name] for threshold in fields(kind)})

    def changed(self, values: Mapping[str, Any], source: str) -> Thresholds:
        """Raises ConfigError as `check_thresholds` does."""
        check_thresholds(values, source)
        return Thresholds({**self.values, **values})

    def differences(self, other: Thresholds) -> list[str]:
        """ "name: ours -> theirs"."""
        pairs = [(name, self.values[name], other.values[name]) for name in NAMES]
        return [f"{name}: {ours} -> {theirs}" for name, ours, theirs in pairs if ours != theirs]


#: A small batch is no reason to refuse a burst, of which a GPU would be done in seconds.
_LEAST_QUEUED_REQUESTS = 256
_QUEUED_BATCHES = 4


def _bounds(config: WorkerConfig) -> dict[str, int]:
    """What may wait when no flag says so: four batches, and for each request one step of prefill."""
    requests = max(_LEAST_QUEUED_REQUESTS, _QUEUED_BATCHES * config.max_batch_size)
    return {"max_queued_requests": requests, "max_queued_tokens": requests * config.max_num_tokens}


def check_thresholds(values: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for a name that is none, or a value that is not allowed; `source` says where they come from."""
    for name, value in values.items():
        if name not in NAMES:
            raise ConfigError.bad_value(source, name, f"one of {', '.join(NAMES)}")
        try:
            check_value(name, value, f"{source}: {name}")
        except TypeError:
            raise ConfigError.bad_value(f"{source}: {name}", value, "a number") from None


def _reason(error: OSError | ValueError) -> str:
    """Without the path, which is in the message already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_policy_file(path: Path) -> dict[str, Any]:
    """Raise ConfigError for a file that is not there, or no mapping."""
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError.bad_value(
            "--policy-file", str(path), f"a readable YAML file ({_reason(error)})"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError.bad_value("--policy-file", str(path), f"a mapping with {', '.join(NAMES)}")
    return content


T = TypeVar("T")


class Live(Generic[T]):
    """A value that may change while requests run; a request that has read it keeps what it read."""

    def __init__(self, value: T) -> None:
        self._value = value

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value
