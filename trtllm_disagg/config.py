"""What one worker is told to be: the typed result of the command line, with every default and every check.

Nothing else holds a default. `args.py` reads flag names, types, choices and defaults from the fields below.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple

from trtllm_disagg.errors import ConfigError


class Role(StrEnum):
    """Which part of a request this worker runs."""

    AGG = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class Strategy(StrEnum):
    """Who calls whom when prefill and decode are separate workers."""

    DECODE_FIRST = "decode_first"
    PREFILL_FIRST = "prefill_first"
    ROUTER = "router"

    @property
    def first_stage_role(self) -> Role | None:
        """The role that takes requests and calls the other one; None where the frontend chains both."""
        return _FIRST_STAGE_ROLES[self]


class ScheduleStyle(StrEnum):
    """Which of a request's two phases is dispatched first."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


_FIRST_STAGE_ROLES = {
    Strategy.DECODE_FIRST: Role.DECODE,
    Strategy.PREFILL_FIRST: Role.PREFILL,
    Strategy.ROUTER: None,
}


class EndpointParts(NamedTuple):
    """The three names of a Dynamo endpoint."""

    namespace: str
    component: str
    endpoint: str

    @property
    def dotted(self) -> str:
        """The form that `DistributedRuntime.endpoint` takes."""
        return ".".join(self)

    @property
    def url(self) -> str:
        return f"dyn://{self.dotted}"


_NAME = r"[A-Za-z0-9_-]+"
_ENDPOINT = re.compile(rf"dyn://({_NAME})\.({_NAME})\.({_NAME})")
_ENDPOINT_TYPES = ("chat", "completions", "none")


def parse_endpoint_id(endpoint_id: str, key: str = "endpoint") -> EndpointParts:
    """Split `dyn://namespace.component.endpoint`; `key` is what an error calls the setting."""
    match = _ENDPOINT.fullmatch(endpoint_id)
    if match is None:
        raise ConfigError.bad_value(key, endpoint_id, "dyn://namespace.component.endpoint")
    return EndpointParts(*match.groups())


class Rule(NamedTuple):
    """What one field accepts, in words and as a test."""

    allowed: str
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


def _one_of(*choices: str) -> Rule:
    return Rule("one of " + ", ".join(choices), lambda value: value in choices, choices)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_endpoint_types(value: str) -> bool:
    names = [name.strip() for name in value.split(",")]
    known = all(name in _ENDPOINT_TYPES for name in names)
    return known and (names == ["none"] or "none" not in names)


_POSITIVE = Rule("a whole number above 0", _is_positive)
_POWER_OF_TWO = Rule("a power of two", lambda value: _is_positive(value) and value & (value - 1) == 0)
_FRACTION = Rule("a number above 0 and up to 1", lambda value: 0 < value <= 1)
_NOT_EMPTY = Rule("a name that is not empty", lambda value: bool(value.strip()))
_NAMESPACE = Rule("letters, digits, - and _", lambda value: re.fullmatch(_NAME, value) is not None)
_ENDPOINT_ID = Rule("dyn://namespace.component.endpoint", lambda value: bool(_ENDPOINT.fullmatch(value)))
_TYPES = Rule("chat, completions, both with a comma, or none", _are_endpoint_types)
_ROLE = _one_of(*Role)
_STRATEGY = _one_of(*Strategy)
_STYLE = _one_of(*ScheduleStyle)

_REQUIRED: Any = object()


def _option(default: Any, *, rule: Rule | None = None, flag: str | None = None) -> Any:
    metadata = {"rule": rule, "flag": flag}
    return field(metadata=metadata) if default is _REQUIRED else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker. Raises ConfigError when a value, or a combination of values, makes no sense."""

    model: str = _option(_REQUIRED, rule=_NOT_EMPTY)
    served_model_name: str | None = _option(None, rule=_NOT_EMPTY)

    role: Role = _option(Role.AGG, rule=_ROLE, flag="--disaggregation-mode")  # noqa: RUF009
    strategy: Strategy = _option(  # noqa: RUF009
        Strategy.DECODE_FIRST, rule=_STRATEGY, flag="--disaggregation-strategy"
    )
    schedule_style: ScheduleStyle = _option(ScheduleStyle.CONTEXT_FIRST, rule=_STYLE)  # noqa: RUF009
    engine: str = _option("auto", rule=_one_of("auto", "tensorrt_llm", "embedded"))

    namespace: str = _option("dynamo", rule=_NAMESPACE)
    endpoint: str | None = _option(None, rule=_ENDPOINT_ID)
    next_endpoint: str | None = _option(None, rule=_ENDPOINT_ID)
    discovery_backend: str = _option("file", rule=_one_of("file", "etcd", "kubernetes", "mem"))
    request_plane: str = _option("tcp", rule=_one_of("tcp", "nats"))
    event_plane: str = _option("zmq", rule=_one_of("zmq", "nats"))

    extra_engine_args: str = _option("")
    override_engine_args: str = _option("")
    load_format: str = _option("auto", rule=_one_of("auto", "dummy", "vision_only", "gms"))
    guided_decoding_backend: str | None = _option(None, rule=_one_of("xgrammar", "llguidance"))

    tensor_parallel_size: int = _option(1, rule=_POSITIVE)
    pipeline_parallel_size: int = _option(1, rule=_POSITIVE)
    expert_parallel_size: int | None = _option(None, rule=_POSITIVE)
    enable_attention_dp: bool = _option(False)
    gpus_per_node: int | None = _option(None, rule=_POSITIVE)

    kv_block_size: int = _option(32, rule=_POWER_OF_TWO)
    max_batch_size: int = _option(2048, rule=_POSITIVE)
    max_num_tokens: int = _option(8192, rule=_POSITIVE)
    max_seq_len: int | None = _option(None, rule=_POSITIVE)
    max_beam_width: int = _option(1, rule=_POSITIVE)
    free_gpu_memory_fraction: float = _option(0.9, rule=_FRACTION)

    publish_kv_events: bool = _option(False)
    publish_metrics: bool = _option(False)

    endpoint_types: str = _option("chat,completions", rule=_TYPES)
    custom_jinja_template: str | None = _option(None, rule=_NOT_EMPTY)
    tool_call_parser: str | None = _option(None, rule=_NOT_EMPTY, flag="--dyn-tool-call-parser")
    reasoning_parser: str | None = _option(None, rule=_NOT_EMPTY, flag="--dyn-reasoning-parser")

    explicit: frozenset[str] = frozenset()
    """Fields that a flag or a variable set. Those win over the engine YAML; the others only fill it up."""

    def __post_init__(self) -> None:
        for name in SETTINGS:
            check_value(name, getattr(self, name))
        # Plain strings are welcome; the rest of the code compares roles by identity.
        object.__setattr__(self, "role", Role(self.role))
        object.__setattr__(self, "strategy", Strategy(self.strategy))
        object.__setattr__(self, "schedule_style", ScheduleStyle(self.schedule_style))
        self._check_stages()

    def _check_stages(self) -> None:
        if self.next_endpoint is not None and not self.calls_second_stage:
            raise ConfigError.bad_value(
                flag_of("next_endpoint"),
                self.next_endpoint,
                f"no value: in mode {self.role} under {self.strategy}, a worker calls no other worker",
            )
        if self.next_endpoint is not None and self.next_endpoint == self.endpoint_id:
            raise ConfigError.bad_value(
                flag_of("next_endpoint"), self.next_endpoint, "another endpoint than this worker's own"
            )
        if self.endpoint is not None and parse_endpoint_id(self.endpoint).namespace != self.namespace:
            raise ConfigError.bad_value(
                flag_of("endpoint"), self.endpoint, f"an endpoint in the namespace {self.namespace!r}"
            )
        if self.schedule_style is ScheduleStyle.GENERATION_FIRST and (
            self.role is Role.AGG or self.strategy is Strategy.ROUTER
        ):
            raise ConfigError.bad_value(
                flag_of("schedule_style"),
                self.schedule_style.value,
                f"context_first in mode {self.role} under {self.strategy}: only a worker dispatches both phases",
            )
        if self.max_beam_width > 1 and self.role is not Role.AGG:
            raise ConfigError.bad_value(
                flag_of("max_beam_width"),
                self.max_beam_width,
                f"1 in mode {self.role}, because KV transfer carries one beam",
            )

    def is_explicit(self, name: str) -> bool:
        """Somebody chose this value; a default would have been something else, or the same by chance."""
        return name in self.explicit or getattr(self, name) != SETTINGS[name].default

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model

    @property
    def is_first_stage(self) -> bool:
        """Requests come from the frontend, not from another worker; so this worker registers the model.

        Under `router` that is true of both roles: the frontend calls one after the other.
        """
        return self.role is Role.AGG or self.strategy.first_stage_role in (self.role, None)

    @property
    def calls_second_stage(self) -> bool:
        """This worker sends a part of each request to a worker of the other role."""
        return self.role is not Role.AGG and self.strategy.first_stage_role is self.role

    @property
    def endpoint_id(self) -> str:
        """Where this worker is reached."""
        return self.endpoint or EndpointParts(self.namespace, self._component, "generate").url

    @property
    def next_endpoint_id(self) -> str | None:
        """Where the second stage is reached; None on a worker that calls nobody."""
        if not self.calls_second_stage:
            return None
        return self.next_endpoint or EndpointParts(self.namespace, _NEXT_COMPONENT, "generate").url

    @property
    def partner_endpoint_id(self) -> str | None:
        """Where workers of the other role are, unless they were given another endpoint; None in mode agg."""
        if self.role is Role.AGG or self.calls_second_stage:
            return self.next_endpoint_id
        is_routed_decode = self.strategy is Strategy.ROUTER and self.role is Role.DECODE
        component = _ROUTED_PREFILL_COMPONENT if is_routed_decode else _FIRST_COMPONENT
        return EndpointParts(self.namespace, component, "generate").url

    @property
    def _component(self) -> str:
        if not self.is_first_stage:
            return _NEXT_COMPONENT
        chained_by_frontend = self.strategy is Strategy.ROUTER and self.role is Role.PREFILL
        return _ROUTED_PREFILL_COMPONENT if chained_by_frontend else _FIRST_COMPONENT


# The component names of Dynamo 0.6, so that its launch scripts and dashboards still fit.
_FIRST_COMPONENT = "tensorrt_llm"
_NEXT_COMPONENT = "tensorrt_llm_next"
_ROUTED_PREFILL_COMPONENT = "prefill"

SETTINGS = {setting.name: setting for setting in fields(WorkerConfig) if setting.name != "explicit"}
"""The dataclass field of every setting that a user can give, by name."""


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    flag: str | None = SETTINGS[name].metadata["flag"]
    return flag or "--" + name.replace("_", "-")


def rule_of(name: str) -> Rule | None:
    """What a field accepts; None when any value of its type does."""
    rule: Rule | None = SETTINGS[name].metadata["rule"]
    return rule


def check_value(name: str, value: object, key: str | None = None) -> None:
    """Raise ConfigError unless the field takes this value; `key` says where the value came from."""
    rule = rule_of(name)
    if rule is None or (value is None and SETTINGS[name].default is None):
        return
    if not rule.accepts(value):
        raise ConfigError.bad_value(key or flag_of(name), value, rule.allowed)
