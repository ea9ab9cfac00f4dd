"""The thresholds of deciders and admission, which `trtllm-disagg set` changes while workers run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from trtllm_disagg.config.deciders import DeciderRule
from trtllm_disagg.config.worker_config import DECIDER_THRESHOLDS, WorkerConfig, check_value, flag_of
from trtllm_disagg.errors import ConfigError

#: Used by every worker.
ADMISSION = ("max_queued_requests", "max_queued_tokens")
#: Used, like the deciders', only by a worker that calls another.
FALLBACK_BUDGET = ("max_local_fallbacks", "max_local_fallback_tokens")
NAMES = (*DECIDER_THRESHOLDS, *FALLBACK_BUDGET, *ADMISSION)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The values of the thresholds in NAMES: tokens, requests, or a share."""

    values: Mapping[str, int | float]
    #: Threshold without effect on this worker -> what is allowed instead of a value.
    unused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: WorkerConfig) -> Thresholds:
        given = {name: value for name in NAMES if (value := config.value_of(name)) is not None}
        return cls(_bounds(config) | given, _unused(config))

    def __getitem__(self, name: str) -> int:
        """The value of an integer threshold in ADMISSION or FALLBACK_BUDGET."""
        return int(self.values[name])

    def rule(self, rule_type: type[DeciderRule]) -> DeciderRule:
        """A decider's rule with these thresholds."""
        return replace(
            rule_type(), **{threshold.name: self.values[threshold.name] for threshold in fields(rule_type)}
        )

    def changed(self, values: Mapping[str, Any], source: str) -> Thresholds:
        """Raises ConfigError like `check_thresholds`, and for a threshold without effect."""
        check_thresholds(values, source)
        for name, allowed in self.unused.items():
            if values.get(name):
                raise ConfigError.bad_value(f"{source}: {name}", values[name], allowed)
        return replace(self, values={**self.values, **values})

    def differences(self, other: Thresholds) -> list[str]:
        """ "name: ours -> theirs"."""
        pairs = [(name, self.values[name], other.values[name]) for name in NAMES]
        return [f"{name}: {ours} -> {theirs}" for name, ours, theirs in pairs if ours != theirs]


#: A burst of this size is accepted even with a small batch: a GPU serves it in seconds.
_LEAST_QUEUED_REQUESTS = 256
_QUEUED_BATCHES = 4


def _bounds(config: WorkerConfig) -> dict[str, int]:
    """The defaults of ADMISSION: four batches of requests, and one prefill step of tokens per request."""
    requests = max(_LEAST_QUEUED_REQUESTS, _QUEUED_BATCHES * config.max_batch_size)
    may_wait = config.max_queued_requests or requests
    return {"max_queued_requests": requests, "max_queued_tokens": may_wait * config.max_num_tokens}


def _unused(config: WorkerConfig) -> dict[str, str]:
    if not config.may_switch:
        allowed = f"no value in mode {config.role} under {config.strategy}, where no worker calls another"
        return dict.fromkeys((*DECIDER_THRESHOLDS, *FALLBACK_BUDGET), allowed)
    if config.on_missing_stage == "fail":
        return dict.fromkeys(FALLBACK_BUDGET, f"0 with {flag_of('on_missing_stage')} fail")
    return {}


def check_thresholds(values: Mapping[str, Any], source: str) -> None:
    """Raises ConfigError for an unknown name or a bad value; `source` names their origin."""
    for name, value in values.items():
        if name not in NAMES:
            raise ConfigError.bad_value(source, name, f"one of {', '.join(NAMES)}")
        try:
            if value is None:  # of a setting it means that none was given; this one was
                raise TypeError
            check_value(name, value, f"{source}: {name}")
        except TypeError:
            raise ConfigError.bad_value(f"{source}: {name}", value, "a number") from None


T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Live(Generic[T]):
    """A value that may change while requests run. A request keeps the value that it read."""

    value: T
