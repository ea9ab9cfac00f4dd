"""The settings of one worker, each with its type, default, check, flag, help and other names, in one place.

`config/args.py` makes the command line of the fields below, and reads command line and environment into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, NoReturn

from trtllm_disagg.config.deciders import ALWAYS, BY_OCCUPANCY, DECIDERS
from trtllm_disagg.config.settings import (
    API_TYPES,
    DYNAMO_RUNTIME,
    DYNAMO_WORKER,
    ENDPOINT_ID,
    ENDPOINT_PATH,
    FRACTION,
    NAMESPACE,
    NATS_URL,
    NOT_EMPTY,
    NUMBER,
    POSITIVE,
    POWER_OF_TWO,
    REQUIRED,
    SECONDS,
    SECONDS_OR_NONE,
    TRIES,
    Setting,
    endpoint_of,
    one_of,
    option,
    parse_endpoint_id,
)
from trtllm_disagg.engine.engines import ENGINES, UNRESOLVED, EngineSpec
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, StrategySpec, disaggregated, worker_side

ORCHESTRATION_GROUP = "orchestration (first stage)"

#: Handoff protocols that can express only one schedule style; `dynamo` can express both.
_ONLY_STYLE = {"two_phase": "context_first", "bootstrap": "generation_first"}


def require_style(protocol: str, style: str) -> None:
    """Raise ConfigError, which names both flags."""
    only = _ONLY_STYLE.get(protocol, style)
    if only != style:
        raise ConfigError.bad_value(
            "--handoff-protocol",
            protocol,
            f"dynamo with --schedule-style {style}; {protocol} needs --schedule-style {only}",
        )


class Role(StrEnum):
    """Which part of a request this worker runs; `strategies.WorkerRole` as an enum."""

    AGG = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class ScheduleStyle(StrEnum):
    """Which of a request's two phases is dispatched first."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


ROLES, STYLES = one_of(*Role), one_of(*ScheduleStyle)
#: No GPU takes this long for a token, not even while it compiles kernels for the first one.
_STALL_SECONDS = 600.0
#: Variables of the flag that sets both publishers.
BOTH_PUBLISHERS_VARIABLE = "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker. Raises ConfigError when a value, or a combination of values, makes no sense."""

    model: str = option(
        REQUIRED,
        "path, or name on the Hugging Face hub",
        NOT_EMPTY,
        group="model",
        dynamo=DYNAMO_WORKER,
        aliases=("--model-path",),
    )
    served_model_name: str | None = option(
        None, "name for clients (default: the value of --model)", NOT_EMPTY, dynamo=DYNAMO_WORKER
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model on the hub", NOT_EMPTY, dynamo=DYNAMO_WORKER
    )
    load_format: str = option(
        "auto", "how weights are loaded", one_of("auto", "dummy", "vision_only"), dynamo=DYNAMO_WORKER
    )

    role: Role = option(  # noqa: RUF009
        Role.AGG,
        "the part of a request that this worker runs",
        ROLES,
        group="disaggregation",
        flag="--disaggregation-mode",
        dynamo=DYNAMO_WORKER,
    )
    strategy: str = option(
        "decode_first",
        "how the workers divide a request",
        one_of(*disaggregated()),
        flag="--disaggregation-strategy",
    )
    schedule_style: ScheduleStyle = option(  # noqa: RUF009
        ScheduleStyle.CONTEXT_FIRST,
        "generation_first: both stages at once, KV is written as it is made",
        STYLES,
    )
    engine: str = option(
        "auto",
        "auto: tensorrt_llm where it is installed, else embedded; recording makes no real tokens (benchmarks)",
        one_of("auto", *ENGINES),
    )

    prefill_decider: str = option(
        ALWAYS,
        "when a request uses both stages",
        one_of(*DECIDERS),
        group=ORCHESTRATION_GROUP,
    )
    thresholds: Mapping[str, int | float] = field(default_factory=dict)
    """Those of the deciders (`deciders.py`), each a setting by its own name; all of them, once this is made."""
    policy_file: str | None = option(
        None, "YAML with thresholds; watched, so they change without restart", NOT_EMPTY
    )
    next_router: str = option(
        "round_robin",
        "how an instance of the second stage is chosen",
        one_of("kv", "least_loaded", "round_robin", "random"),
    )
    prefill_dispatch: str = option(
        "direct", "direct, or a global queue on NATS JetStream", one_of("direct", "queue")
    )
    nats_server: str = option(
        "nats://127.0.0.1:4222", "NATS servers of that queue", NATS_URL, variables=("NATS_SERVER",)
    )
    handoff_protocol: str = option(
        "dynamo", "the shape of the bodies between the stages", one_of("dynamo", "two_phase", "bootstrap")
    )
    on_missing_stage: str = option(
        "local", "local: serve alone when no worker of the other role can", one_of("local", "fail")
    )
    max_local_fallbacks: int = option(
        0,
        "max requests at once that this worker serves alone because the other stage fails; 0: no bound",
        NUMBER,
    )
    max_local_fallback_tokens: int = option(
        0, "max tokens, prompts and answers, of those requests; 0: no bound", NUMBER
    )
    pull_min_tokens: int = option(
        96,
        "prefill_first: min tokens of the answer before this turn that prefill pulls from decode, and does not "
        "compute; 0: never",
        NUMBER,
    )
    max_tries: int = option(2, "instances of the second stage to try for one request", TRIES)
    breaker_failures: int = option(3, "failures in a row that trip an instance's circuit breaker", POSITIVE)
    breaker_seconds: float = option(5.0, "seconds a tripped instance is skipped", SECONDS)
    queue_timeout: float = option(30.0, "max seconds a prefill waits in the queue", SECONDS)
    prefill_timeout: float = option(120.0, "max seconds of a prefill, waiting included", SECONDS)
    first_decode_token_timeout: float = option(
        60.0, "max seconds from handoff to decode's first token", SECONDS
    )
    next_decode_token_timeout: float = option(60.0, "max seconds between decode tokens", SECONDS)

    max_queued_requests: int | None = option(
        None,
        "max requests without a first token, further ones are refused with 529; 0: no bound "
        "(default: four batches, at least 256)",
        NUMBER,
        group="overload",
    )
    max_queued_tokens: int | None = option(
        None,
        "max prompt tokens of requests without a first token, as above "
        "(default: one step of max_num_tokens for each request that may wait)",
        NUMBER,
    )

    namespace: str = option(
        "dynamo", "Dynamo namespace", NAMESPACE, group="endpoints and planes", dynamo=DYNAMO_RUNTIME
    )
    worker_revision: str | None = option(
        None,
        "revision of model or software in a rolling update, appended to the namespace",
        NAMESPACE,
        variables=("DYN_NAMESPACE_WORKER_SUFFIX",),
    )
    endpoint: str | None = option(
        None, "where this worker is reached, dyn://ns.component.endpoint", ENDPOINT_ID, dynamo=DYNAMO_RUNTIME
    )
    kv_state_endpoint: str | None = option(
        None,
        "endpoint that owns this worker's KV events (default: the one that serves)",
        ENDPOINT_PATH,
        dynamo=DYNAMO_RUNTIME,
    )
    next_endpoint: str | None = option(
        None, "where the second stage is reached; first stage only", ENDPOINT_ID
    )
    discovery_backend: str = option(
        "file",
        "how workers find each other",
        one_of("file", "etcd", "kubernetes", "mem"),
        dynamo=DYNAMO_RUNTIME,
    )
    request_plane: str = option("tcp", "how requests travel", one_of("tcp", "nats"), dynamo=DYNAMO_RUNTIME)
    event_plane: str = option("zmq", "how KV events travel", one_of("zmq", "nats"), dynamo=DYNAMO_RUNTIME)
    drain_seconds: float = option(
        30.0, "seconds after SIGTERM for running requests; then other workers continue them", SECONDS_OR_NONE
    )
    frozen_seconds: float = option(
        7.0,
        "seconds until a worker stopped by SIGSTOP is killed, so that others continue; 0: never",
        SECONDS_OR_NONE,
    )

    health_check_payload: str | None = option(
        None,
        "JSON, or @FILE with it: the request of a health probe (default: one token of a prompt of one)",
        NOT_EMPTY,
        group="health and process",
        dynamo=DYNAMO_RUNTIME,
    )
    engine_health_check_interval: float = option(
        0.5, "seconds between two questions whether the engine lives", SECONDS_OR_NONE, dynamo=DYNAMO_RUNTIME
    )
    engine_health_check_timeout: float = option(
        30.0,
        "seconds after which an engine that does not answer that is dead; 0: never",
        SECONDS_OR_NONE,
        dynamo=DYNAMO_RUNTIME,
    )
    engine_health_shutdown_timeout: float = option(
        60.0, "max seconds of the engine's own shutdown; 0: no limit", SECONDS_OR_NONE, dynamo=DYNAMO_RUNTIME
    )
    engine_stall_timeout: float | None = option(
        None,
        "seconds without a token of any request that runs, after which the engine is dead; 0: never "
        "(default: 600 on tensorrt_llm; the embedded engine watches its own steps)",
        SECONDS_OR_NONE,
    )
    server_disable_gc: bool = option(
        False,
        "Python's collector of cycles is off",
        dynamo=DYNAMO_WORKER,
        variables=("TRTLLM_SERVER_DISABLE_GC",),
    )

    admin_key_file: str | None = option(
        None,
        "key with which `switch`, `set` and `flip` are signed (default: none, and they are refused)",
        NOT_EMPTY,
        group="administration",
    )

    extra_engine_args: str = option(
        "",
        "YAML file of engine arguments; it wins over the flags below",
        group="engine arguments",
        dynamo=DYNAMO_WORKER,
    )
    override_engine_args: str = option(
        "", "JSON object laid over the YAML file and every flag", dynamo=DYNAMO_WORKER
    )
    tensor_parallel_size: int = option(1, "GPUs that share each layer", POSITIVE, dynamo=DYNAMO_WORKER)
    pipeline_parallel_size: int = option(
        1, "groups of GPUs that share the layers", POSITIVE, dynamo=DYNAMO_WORKER
    )
    expert_parallel_size: int | None = option(
        None, "GPUs that share the experts", POSITIVE, dynamo=DYNAMO_WORKER
    )
    enable_attention_dp: bool = option(
        False, "attention runs data-parallel instead of tensor-parallel", dynamo=DYNAMO_WORKER
    )
    conversation_affinity: bool = option(
        False,
        "with attention DP, the requests of a conversation run on one rank",
        variables=("DYN_ENGINE_CONV_AFFINITY",),
    )
    conversation_affinity_dp_rank_source: str = option(
        "engine",
        "chooses the rank of a conversation's first request",
        one_of("engine", "dynamo"),
        variables=("DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE",),
    )
    gpus_per_node: int | None = option(
        None, "GPUs of one node (default: as found)", POSITIVE, dynamo=DYNAMO_WORKER
    )
    kv_block_size: int = option(
        32, "tokens in one KV block; without it TensorRT-LLM chooses", POWER_OF_TWO, dynamo=DYNAMO_WORKER
    )
    max_batch_size: int = option(
        2048, "requests in one step; on the embedded engine 64 unless given", POSITIVE, dynamo=DYNAMO_WORKER
    )
    max_num_tokens: int = option(
        8192, "tokens in one step; on the embedded engine 512 unless given", POSITIVE, dynamo=DYNAMO_WORKER
    )
    max_seq_len: int | None = option(
        None,
        "tokens of one request, prompt and answer (default: the model's)",
        POSITIVE,
        dynamo=DYNAMO_WORKER,
    )
    max_beam_width: int = option(1, "beams of one request", POSITIVE, dynamo=DYNAMO_WORKER)
    free_gpu_memory_fraction: float = option(
        0.9, "share of the free GPU memory that KV takes", FRACTION, dynamo=DYNAMO_WORKER
    )
    guided_decoding_backend: str | None = option(
        None, "library behind structured output", one_of("xgrammar", "llguidance"), dynamo=DYNAMO_WORKER
    )

    publish_kv_events: bool = option(
        False,
        "tell the KV router which blocks this worker holds",
        group="publishing",
        dynamo=DYNAMO_WORKER,
        variables=(BOTH_PUBLISHERS_VARIABLE,),
    )
    publish_metrics: bool = option(
        False, "publish load and engine metrics", dynamo=DYNAMO_WORKER, variables=(BOTH_PUBLISHERS_VARIABLE,)
    )
    publish_forward_pass_metrics: bool = option(
        False,
        "publish what each step does, for Dynamo's Planner; --publish-metrics does so too, "
        "and DYN_FORWARDPASS_METRIC_PORT or DYN_FPM_TRACE",
    )

    endpoint_types: str = option(
        "chat,completions",
        "chat, completions, both with a comma, or none",
        API_TYPES,
        group="API",
        dynamo=DYNAMO_RUNTIME,
        aliases=("--dyn-endpoint-types",),
    )
    custom_jinja_template: str | None = option(
        None, "file of a chat template", NOT_EMPTY, dynamo=DYNAMO_RUNTIME
    )
    tool_call_parser: str | None = option(
        None, "parser of tool calls", NOT_EMPTY, flag="--dyn-tool-call-parser", dynamo=DYNAMO_RUNTIME
    )
    reasoning_parser: str | None = option(
        None, "parser of reasoning", NOT_EMPTY, flag="--dyn-reasoning-parser", dynamo=DYNAMO_RUNTIME
    )
    exclude_tools_when_tool_choice_none: bool = option(
        True, "chats with tool_choice none show the model no tools", dynamo=DYNAMO_RUNTIME
    )
    default_thinking_mode: str | None = option(
        None,
        "whether chats think that do not say",
        one_of("enabled", "disabled"),
        flag="--dyn-default-thinking-mode",
        dynamo=DYNAMO_RUNTIME,
    )
    structural_tag: str | None = option(
        None,
        "true, false or JSON: tool calls are held to their schemas (default: if guided_decoding_backend is xgrammar)",
        NOT_EMPTY,
        flag="--dyn-structural-tag",
        dynamo=DYNAMO_RUNTIME,
        bare="true",
    )

    dump_config_to: str | None = option(
        None,
        "file for the configuration that came out of all this, as JSON",
        NOT_EMPTY,
        dynamo=DYNAMO_RUNTIME,
    )

    explicit: frozenset[str] = frozenset()
    """Fields that a flag or a variable set. When the engine YAML overrules one of those, a warning says so."""
    override_flag: str = "--override-engine-args"
    """What gave `override_engine_args`; `--trtllm.` where each of its keys was a flag."""
    router_flags: tuple[str, ...] = ()
    """What this worker advertises for the frontend's router, as Dynamo's flags."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.thresholds if name not in DECIDER_THRESHOLDS]:
            raise ConfigError.bad_value("thresholds", unknown[0], f"one of {', '.join(DECIDER_THRESHOLDS)}")
        every = {name: self.thresholds.get(name, SETTINGS[name].default) for name in DECIDER_THRESHOLDS}
        object.__setattr__(self, "thresholds", every)
        for name in SETTINGS:
            check_value(name, self.value_of(name))
        # Callers may pass plain strings; the rest of the code compares enum members by identity.
        object.__setattr__(self, "role", Role(self.role))
        object.__setattr__(self, "schedule_style", ScheduleStyle(self.schedule_style))
        self._check_stages()

    def _check_stages(self) -> None:
        here = f"in mode {self.role} under {self.strategy}"
        if self.next_endpoint is not None and not self.calls_second_stage:
            self._refuse("next_endpoint", f"no value: {here}, a worker calls no other worker")
        if self.next_endpoint is not None and self.next_endpoint == self.endpoint_id:
            self._refuse("next_endpoint", "another endpoint than this worker's own")
        if self.endpoint is not None and parse_endpoint_id(self.endpoint).namespace != self.namespace:
            self._refuse("endpoint", f"an endpoint in the namespace {self.namespace!r}")
        is_generation_first = self.schedule_style is ScheduleStyle.GENERATION_FIRST
        if is_generation_first and not self.may_switch:
            self._refuse("schedule_style", f"context_first {here}: only a worker dispatches both phases")
        if not self.may_switch:
            for name in ORCHESTRATION:
                if self.value_of(name) != SETTINGS[name].default:
                    callers = f"{flag_of('strategy')} {' or '.join(worker_side())} have a use for it"
                    self._refuse(name, f"no value {here}, where no worker calls another; {callers}")
        if self.prefill_decider in BY_OCCUPANCY and not self.publish_metrics:
            self._refuse(
                "prefill_decider", f"another one, or {flag_of('publish_metrics')}: it reads the engine's load"
            )
        if self.on_missing_stage == "fail":
            for name in ("max_local_fallbacks", "max_local_fallback_tokens"):
                if self.value_of(name):
                    fails = f"{flag_of('on_missing_stage')} fail"
                    self._refuse(name, f"no value with {fails}, where no request is served alone")
        require_style(self.handoff_protocol, self.schedule_style)
        if self.prefill_dispatch == "queue" and is_generation_first:
            self._refuse("prefill_dispatch", "direct with --schedule-style generation_first")
        if self.max_beam_width > 1 and self.role is not Role.AGG:
            self._refuse("max_beam_width", f"1 in mode {self.role}, because KV transfer carries one beam")

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        value = self.value_of(name)
        shown = value.value if isinstance(value, StrEnum) else value
        raise ConfigError.bad_value(flag_of(name), shown, allowed)

    def is_explicit(self, name: str) -> bool:
        """The user chose this value: by a flag or variable, or it differs from the default."""
        return name in self.explicit or self.value_of(name) != SETTINGS[name].default

    def value_of(self, name: str) -> Any:
        """The value of the setting `name`, one of SETTINGS."""
        return self.thresholds[name] if name in DECIDER_THRESHOLDS else getattr(self, name)

    @property
    def stall_seconds(self) -> float:
        """0: never."""
        if self.engine_stall_timeout is not None:
            return self.engine_stall_timeout
        return _STALL_SECONDS if self.engine_spec.is_tensorrt_llm else 0.0

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model

    @property
    def engine_spec(self) -> EngineSpec:
        return ENGINES.get(self.engine, UNRESOLVED)

    @property
    def strategy_spec(self) -> StrategySpec:
        return STRATEGIES[self.strategy]

    @property
    def is_first_stage(self) -> bool:
        """Requests come from the frontend, so this worker registers the model. Under `router` both roles do."""
        return self.role is Role.AGG or self.strategy_spec.entry_role in (self.role.value, None)

    @property
    def calls_second_stage(self) -> bool:
        """This worker sends a part of each request to a worker of the other role."""
        return self.role is not Role.AGG and self.strategy_spec.entry_role == self.role.value

    @property
    def reads_statistics(self) -> bool:
        """This worker reads the statistics of engine steps, which the engine makes only on demand."""
        return self.publish_metrics or self.publish_forward_pass_metrics

    @property
    def tells_peers(self) -> bool:
        """Workers of the other role select among workers of this role by their caches."""
        return self.may_switch and self.next_router == "kv"

    @property
    def reads_kv_events(self) -> bool:
        """This worker's decider needs the content of its engine's cache, or would need it after a switch to auto."""
        decides = self.prefill_decider != ALWAYS or not self.strategy_spec.builder
        return self.role is not Role.AGG and (decides or (self.may_switch and self.publish_kv_events))

    @property
    def reads_occupancy(self) -> bool:
        """This worker asks the workers of the other role how full they are."""
        return self.role in BY_OCCUPANCY.get(self.prefill_decider, ())

    @property
    def endpoint_id(self) -> str:
        """Where this worker is reached."""
        return self.frontend_endpoint_id if self.is_first_stage else self.worker_endpoint_id

    @property
    def frontend_endpoint_id(self) -> str:
        """Where frontends reach this worker while it is a first stage; both roles share it where either can be."""
        given = self.endpoint if self.is_first_stage else None
        return given or endpoint_of(self.namespace, None if self.may_switch else self.role)

    @property
    def worker_endpoint_id(self) -> str:
        """Where workers of the other role reach this one, whichever stage it is."""
        if not self.may_switch:
            return self.frontend_endpoint_id
        return (None if self.is_first_stage else self.endpoint) or endpoint_of(self.namespace, self.role)

    @property
    def next_endpoint_id(self) -> str | None:
        """Where the second stage is reached; None on a worker that calls no other worker."""
        return (self.next_endpoint or self._default_peer) if self.calls_second_stage else None

    @property
    def peer_endpoint_id(self) -> str | None:
        """Where this worker finds workers of the other role; None in mode agg."""
        calls_or_has_none = self.role is Role.AGG or self.calls_second_stage
        return self.next_endpoint_id if calls_or_has_none else self._default_peer

    @property
    def may_switch(self) -> bool:
        """This worker can be the first stage as well as the second one, and become the other while it serves."""
        return self.role is not Role.AGG and self.strategy_spec.is_worker_side

    @property
    def _default_peer(self) -> str:
        return endpoint_of(self.namespace, Role.PREFILL if self.role is Role.DECODE else Role.DECODE)


def _fields() -> Iterator[Field[Any]]:
    for each in fields(WorkerConfig):
        if each.name == "thresholds":
            yield from (threshold for decider in DECIDERS.values() for threshold in fields(decider))
        elif "setting" in each.metadata:
            yield each


def _settings() -> Iterator[Setting]:
    group = ""
    for each in _fields():
        setting: Setting = each.metadata["setting"].of_field(each.name, each.default, group)
        group = setting.group
        yield setting


SETTINGS = {setting.name: setting for setting in _settings()}
"""Every setting that a user can give, by its field, in the order of `--help`."""

DECIDER_THRESHOLDS = tuple(name for name in SETTINGS if name not in WorkerConfig.__dataclass_fields__)


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return SETTINGS[name].flag


ORCHESTRATION = tuple(
    name
    for name, setting in SETTINGS.items()
    if setting.group == ORCHESTRATION_GROUP and name not in ("nats_server", "policy_file")
)
"""Settings of the calls of a worker to others; other workers refuse them. NATS_SERVER may be set for all, and a policy
file has thresholds that all use (`Thresholds.unused`)."""


def choices_of(name: str) -> tuple[str, ...]:
    """The allowed values of a field; empty when they are not a list."""
    allowed = SETTINGS[name].allowed
    return allowed.choices if allowed else ()


def check_value(name: str, value: object, key: str | None = None) -> None:
    """Raise ConfigError unless the field accepts this value; `key` names the origin of the value."""
    allowed = SETTINGS[name].allowed
    if allowed is None or (value is None and SETTINGS[name].default is None):
        return
    if not allowed.accepts(value):
        raise ConfigError.bad_value(key or flag_of(name), allowed.shown(value), allowed.in_words)
