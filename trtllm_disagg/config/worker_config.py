"""Defines each setting of a worker in one place: type, default, check, flag, help and other names.

`config/args.py` makes the command line from these fields, and reads command line and environment into them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

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
from trtllm_disagg.engine.table import ENGINES, UNRESOLVED, EngineSpec
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, StrategySpec, disaggregated, run_by_workers

ORCHESTRATION_GROUP = "orchestration (first stage)"

#: Handoff protocols for only one schedule style; `dynamo` supports both.
_ONLY_STYLE = {"two_phase": "context_first", "bootstrap": "generation_first"}


def require_style(protocol: str, style: str) -> None:
    """Raises ConfigError, naming both flags."""
    only = _ONLY_STYLE.get(protocol, style)
    if only != style:
        raise ConfigError.bad_value(
            "--handoff-protocol",
            protocol,
            f"dynamo with --schedule-style {style}; {protocol} needs --schedule-style {only}",
        )


class Role(StrEnum):
    """The part of a request that this worker runs; `strategies.WorkerRole` as an enum."""

    AGG = "agg"
    PREFILL = "prefill"
    DECODE = "decode"


class ScheduleStyle(StrEnum):
    """Which of a request's phases is dispatched first."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


class ImageConfig(NamedTuple):
    """What a worker that serves images is given."""

    max_file_size_mb: int


ROLES, STYLES = one_of(*Role), one_of(*ScheduleStyle)
#: Variables of the flag for both publishers.
BOTH_PUBLISHERS_VARIABLE = "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's settings. Raises ConfigError for an invalid value or combination."""

    model: str = option(
        REQUIRED,
        "directory, or name on the Hugging Face hub",
        NOT_EMPTY,
        group="model",
        dynamo=DYNAMO_WORKER,
        aliases=("--model-path",),
    )
    served_model_name: str | None = option(
        None, "name for clients (default: the value of --model)", NOT_EMPTY, dynamo=DYNAMO_WORKER
    )
    revision: str | None = option(None, "branch, tag or commit on the hub", NOT_EMPTY, dynamo=DYNAMO_WORKER)
    load_format: str = option(
        "auto", "how weights are loaded", one_of("auto", "dummy", "vision_only"), dynamo=DYNAMO_WORKER
    )

    role: Role = option(  # noqa: RUF009
        Role.AGG,
        "the role of this worker: which part of a request it runs",
        ROLES,
        group="disaggregation",
        flag="--disaggregation-mode",
        dynamo=DYNAMO_WORKER,
    )
    strategy: str = option(
        "decode_first",
        "which worker gets a request first (auto: decided per request; router: Dynamo's frontend calls both)",
        one_of(*disaggregated()),
        flag="--disaggregation-strategy",
    )
    schedule_style: ScheduleStyle = option(  # noqa: RUF009
        ScheduleStyle.CONTEXT_FIRST,
        "generation_first: both phases at once; prefill writes KV into decode's blocks",
        STYLES,
    )
    engine: str = option(
        "auto",
        "auto: tensorrt_llm if installed, else embedded; modelled: GPU step times; recording: for benchmarks",
        one_of("auto", *ENGINES),
    )

    prefill_decider: str = option(
        ALWAYS, "which requests use two workers", one_of(*DECIDERS), group=ORCHESTRATION_GROUP
    )
    thresholds: Mapping[str, int | float] = field(default_factory=dict)
    """Those of the deciders (`deciders.py`), each a setting by its own name; all of them, once this is made."""
    next_router: str = option(
        "round_robin", "how a worker picks its peer", one_of("kv", "least_loaded", "round_robin", "random")
    )
    prefill_dispatch: str = option(
        "direct", "queue: prefills wait in one queue on NATS JetStream", one_of("direct", "queue")
    )
    nats_server: str = option(
        "nats://127.0.0.1:4222", "NATS servers of the queue", NATS_URL, variables=("NATS_SERVER",)
    )
    handoff_protocol: str = option(
        "dynamo",
        "format of the bodies that the stages send each other",
        one_of("dynamo", "two_phase", "bootstrap"),
    )
    on_missing_stage: str = option(
        "local", "without a usable peer, local: run both phases; fail: answer 503", one_of("local", "fail")
    )
    max_local_fallbacks: int = option(
        0, "max concurrent requests answered alone because the other stage failed; 0: no limit", NUMBER
    )
    max_local_fallback_tokens: int = option(
        0, "max tokens (prompts and answers) of those requests; 0: no limit", NUMBER
    )
    pull_min_tokens: int = option(
        96,
        "min tokens of the previous answer for prefill to fetch its KV (tensorrt_llm: off unless given)",
        NUMBER,
    )
    max_tries: int = option(2, "max instances of the second stage tried per request", TRIES)
    breaker_failures: int = option(3, "failures in a row until an instance is skipped", POSITIVE)
    breaker_seconds: float = option(5.0, "seconds to skip such an instance", SECONDS)
    queue_timeout: float = option(30.0, "max seconds in the prefill queue", SECONDS)
    prefill_timeout: float = option(120.0, "max seconds of a prefill, including waiting", SECONDS)
    first_decode_token_timeout: float = option(
        60.0, "max seconds from handoff to decode's first token", SECONDS
    )
    next_decode_token_timeout: float = option(60.0, "max seconds between decode tokens", SECONDS)

    max_queued_requests: int | None = option(
        None,
        "max requests without a first token; the excess gets 529; 0: no limit (default: four batches, at least 256)",
        NUMBER,
        group="overload",
    )
    max_queued_tokens: int | None = option(
        None,
        "max prompt tokens of those requests; 0: no limit (default: max_num_tokens per request that may wait)",
        NUMBER,
    )

    namespace: str = option(
        "dynamo", "Dynamo namespace", NAMESPACE, group="endpoints and planes", dynamo=DYNAMO_RUNTIME
    )
    worker_revision: str | None = option(
        None,
        "revision of a rollout; appended to the namespace",
        NAMESPACE,
        variables=("DYN_NAMESPACE_WORKER_SUFFIX",),
    )
    endpoint: str | None = option(None, "address of this worker", ENDPOINT_ID, dynamo=DYNAMO_RUNTIME)
    kv_state_endpoint: str | None = option(
        None, "owner of this worker's KV events (default: its endpoint)", ENDPOINT_PATH, dynamo=DYNAMO_RUNTIME
    )
    next_endpoint: str | None = option(None, "address of the second stage (first stage only)", ENDPOINT_ID)
    discovery_backend: str = option(
        "file",
        "how workers find each other",
        one_of("file", "etcd", "kubernetes", "mem"),
        dynamo=DYNAMO_RUNTIME,
    )
    request_plane: str = option("tcp", "transport of requests", one_of("tcp", "nats"), dynamo=DYNAMO_RUNTIME)
    event_plane: str = option("zmq", "transport of KV events", one_of("zmq", "nats"), dynamo=DYNAMO_RUNTIME)
    drain_seconds: float = option(
        30.0,
        "max seconds after SIGTERM for running requests; then other workers continue them",
        SECONDS_OR_NONE,
    )
    frozen_seconds: float = option(
        7.0,
        "seconds until a worker frozen by SIGSTOP is killed, so that others continue its requests; 0: never",
        SECONDS_OR_NONE,
    )

    health_check_payload: str | None = option(
        None,
        "request of a health check, as JSON or @FILE (default: one prompt token, one answer token)",
        NOT_EMPTY,
        group="health and process",
        dynamo=DYNAMO_RUNTIME,
    )
    engine_health_check_interval: float = option(
        0.5, "engine liveness check interval, seconds", SECONDS_OR_NONE, dynamo=DYNAMO_RUNTIME
    )
    engine_health_check_timeout: float = option(
        30.0,
        "seconds without an answer to that check until the engine counts as dead; 0: never",
        SECONDS_OR_NONE,
        dynamo=DYNAMO_RUNTIME,
    )
    engine_health_shutdown_timeout: float = option(
        60.0, "max seconds of the engine's shutdown; 0: no limit", SECONDS_OR_NONE, dynamo=DYNAMO_RUNTIME
    )
    engine_stall_timeout: float | None = option(
        None,
        "seconds without a token of any running request until the engine counts as dead; 0: never "
        "(default: on tensorrt_llm as `doctor` prints; the embedded engine watches its own steps)",
        SECONDS_OR_NONE,
    )
    server_disable_gc: bool = option(
        False,
        "turn Python's garbage collector off",
        dynamo=DYNAMO_WORKER,
        variables=("TRTLLM_SERVER_DISABLE_GC",),
    )

    admin_key_file: str | None = option(
        None,
        "key that `switch`, `set` and `flip` must be signed with (default: none; they are refused)",
        NOT_EMPTY,
        group="administration",
    )

    admin_routes: bool = option(
        False,
        "serve POST /engine/drain and /engine/resume at the system port, unsigned, for every client of that port",
        group="administration",
    )

    extra_engine_args: str = option(
        "",
        "YAML file of engine arguments; overrides the flags below",
        group="engine arguments",
        dynamo=DYNAMO_WORKER,
    )
    override_engine_args: str = option(
        "", "JSON of engine arguments; overrides the YAML file and flags", dynamo=DYNAMO_WORKER
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
        False, "under attention DP, keep a conversation on one rank", variables=("DYN_ENGINE_CONV_AFFINITY",)
    )
    conversation_affinity_dp_rank_source: str = option(
        "engine",
        "what picks the rank of a conversation's first request",
        one_of("engine", "dynamo"),
        variables=("DYN_ENGINE_CONV_AFFINITY_DP_RANK_SOURCE",),
    )
    gpus_per_node: int | None = option(
        None, "GPUs per node (default: detected)", POSITIVE, dynamo=DYNAMO_WORKER
    )
    kv_block_size: int = option(
        32, "tokens per KV block; unless given, TensorRT-LLM's own", POWER_OF_TWO, dynamo=DYNAMO_WORKER
    )
    max_batch_size: int = option(
        2048, "max requests per step; embedded engine: 64 unless given", POSITIVE, dynamo=DYNAMO_WORKER
    )
    max_num_tokens: int = option(
        8192, "max tokens per step; embedded engine: 512 unless given", POSITIVE, dynamo=DYNAMO_WORKER
    )
    max_seq_len: int | None = option(
        None,
        "max tokens of a request, prompt and answer (default: the model's)",
        POSITIVE,
        dynamo=DYNAMO_WORKER,
    )
    max_beam_width: int = option(1, "max beams per request", POSITIVE, dynamo=DYNAMO_WORKER)
    free_gpu_memory_fraction: float = option(
        0.9, "share of free GPU memory for KV", FRACTION, dynamo=DYNAMO_WORKER
    )
    guided_decoding_backend: str | None = option(
        None, "library for structured output", one_of("xgrammar", "llguidance"), dynamo=DYNAMO_WORKER
    )

    publish_kv_events: bool = option(
        False,
        "publish cached blocks to the KV router",
        group="publishing",
        dynamo=DYNAMO_WORKER,
        variables=(BOTH_PUBLISHERS_VARIABLE,),
    )
    publish_metrics: bool = option(
        False, "publish load and engine metrics", dynamo=DYNAMO_WORKER, variables=(BOTH_PUBLISHERS_VARIABLE,)
    )
    publish_forward_pass_metrics: bool = option(
        False,
        "publish each step for Dynamo's Planner; also by --publish-metrics, DYN_FORWARDPASS_METRIC_PORT, DYN_FPM_TRACE",
    )

    endpoint_types: str = option(
        "chat,completions",
        "OpenAI endpoints that the frontend offers for the model",
        API_TYPES,
        group="API",
        dynamo=DYNAMO_RUNTIME,
        aliases=("--dyn-endpoint-types",),
    )
    custom_jinja_template: str | None = option(None, "chat template file", NOT_EMPTY, dynamo=DYNAMO_RUNTIME)
    tool_call_parser: str | None = option(
        None, "tool call parser", NOT_EMPTY, flag="--dyn-tool-call-parser", dynamo=DYNAMO_RUNTIME
    )
    reasoning_parser: str | None = option(
        None, "reasoning parser", NOT_EMPTY, flag="--dyn-reasoning-parser", dynamo=DYNAMO_RUNTIME
    )
    exclude_tools_when_tool_choice_none: bool = option(
        True, "hide tools from the model in chats with tool_choice none", dynamo=DYNAMO_RUNTIME
    )
    default_thinking_mode: str | None = option(
        None,
        "reasoning in chats that do not ask for it or against it",
        one_of("enabled", "disabled"),
        flag="--dyn-default-thinking-mode",
        dynamo=DYNAMO_RUNTIME,
    )
    structural_tag: str | None = option(
        None,
        "true, false or JSON: hold tool calls to their schemas (default: if guided_decoding_backend is xgrammar)",
        NOT_EMPTY,
        flag="--dyn-structural-tag",
        dynamo=DYNAMO_RUNTIME,
        bare="true",
    )

    dump_config_to: str | None = option(
        None, "write the resulting configuration to this JSON file", NOT_EMPTY, dynamo=DYNAMO_RUNTIME
    )

    enable_multimodal: bool = option(
        False, "serve images (on all workers, or none)", group="images", dynamo=DYNAMO_WORKER
    )
    modality: str = option(
        "text", "multimodal: --enable-multimodal", one_of("text", "multimodal"), dynamo=DYNAMO_WORKER
    )
    max_file_size_mb: int = option(50, "max MB of an image", POSITIVE, dynamo=DYNAMO_WORKER)

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
        # Callers may pass strings, but other code compares enum members by identity.
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
                    callers = f"; {flag_of('strategy')} {' or '.join(run_by_workers())} have a use for it"
                    self._refuse(name, f"no value {here}, where no worker calls another{callers}")
        if self.prefill_decider in BY_OCCUPANCY and not self.publish_metrics:
            allowed = f"another one, or {flag_of('publish_metrics')}: it reads the engine's load"
            self._refuse("prefill_decider", allowed)
        if self.on_missing_stage == "fail":
            for name in ("max_local_fallbacks", "max_local_fallback_tokens"):
                if self.value_of(name):
                    self._refuse(name, "no value with --on-missing-stage fail: no request is answered alone")
        if is_generation_first and self.images:
            allowed = "context_first with --enable-multimodal: prefill must count the tokens of images first"
            self._refuse("schedule_style", allowed)
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
        """The user chose this value, by flag or variable, or it differs from the default."""
        return name in self.explicit or self.value_of(name) != SETTINGS[name].default

    def value_of(self, name: str) -> Any:
        """The value of the setting `name` in SETTINGS."""
        return self.thresholds[name] if name in DECIDER_THRESHOLDS else getattr(self, name)

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model

    @property
    def images(self) -> ImageConfig | None:
        """None: this worker refuses images."""
        is_on = self.enable_multimodal or self.modality == "multimodal"
        return ImageConfig(self.max_file_size_mb) if is_on else None

    @property
    def engine_spec(self) -> EngineSpec:
        return ENGINES.get(self.engine, UNRESOLVED)

    @property
    def strategy_spec(self) -> StrategySpec:
        return STRATEGIES[self.strategy]

    @property
    def is_first_stage(self) -> bool:
        """The frontend sends requests here, so this worker registers the model; under `router` both roles do."""
        return self.role is Role.AGG or self.strategy_spec.entry_role in (self.role.value, None)

    @property
    def calls_second_stage(self) -> bool:
        """This worker sends part of each request to a peer."""
        return self.role is not Role.AGG and self.strategy_spec.entry_role == self.role.value

    @property
    def reads_statistics(self) -> bool:
        """This worker reads step statistics, which engines collect only on demand."""
        return self.publish_metrics or self.publish_forward_pass_metrics

    @property
    def informs_peers(self) -> bool:
        """Peers select among workers of this role by their caches."""
        return self.may_switch and self.next_router == "kv"

    @property
    def reads_kv_events(self) -> bool:
        """This worker's decisions or pulls depend on its engine's cache, perhaps only after a switch or flip."""
        decides = self.prefill_decider != ALWAYS or not self.strategy_spec.builder
        may_need = self.may_switch and (self.publish_kv_events or self.pulls_from > 0)
        return self.role is not Role.AGG and (decides or may_need)

    @property
    def pulls_from(self) -> int:
        """Minimum tokens of an answer for its KV to move back to prefill; 0: none moves."""
        is_off = self.engine_spec.is_tensorrt_llm and not self.is_explicit("pull_min_tokens")
        return 0 if is_off else self.pull_min_tokens

    @property
    def reads_occupancy(self) -> bool:
        """This worker queries its peers' occupancy."""
        return self.role in BY_OCCUPANCY.get(self.prefill_decider, ())

    @property
    def endpoint_id(self) -> str:
        """Where this worker is reached."""
        return self.frontend_endpoint_id if self.is_first_stage else self.worker_endpoint_id

    @property
    def frontend_endpoint_id(self) -> str:
        """Where frontends reach this worker as a first stage; both roles share it if either can be one."""
        given = self.endpoint if self.is_first_stage else None
        return given or endpoint_of(self.namespace, None if self.may_switch else self.role)

    @property
    def worker_endpoint_id(self) -> str:
        """Where peers reach this worker, in either stage."""
        if not self.may_switch:
            return self.frontend_endpoint_id
        return (None if self.is_first_stage else self.endpoint) or endpoint_of(self.namespace, self.role)

    @property
    def next_endpoint_id(self) -> str | None:
        """Where the second stage is reached; None if this worker calls no other."""
        return (self.next_endpoint or self._default_peer) if self.calls_second_stage else None

    @property
    def peer_endpoint_id(self) -> str | None:
        """Where this worker finds its peers; None in mode agg."""
        calls_or_has_none = self.role is Role.AGG or self.calls_second_stage
        return self.next_endpoint_id if calls_or_has_none else self._default_peer

    @property
    def may_switch(self) -> bool:
        """This worker can be either stage, and change it while serving."""
        return self.role is not Role.AGG and self.strategy_spec.is_run_by_workers

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
    if setting.group == ORCHESTRATION_GROUP and name != "nats_server"
)
"""Settings of the calls of a worker to others; other workers refuse them. NATS_SERVER may be set for all."""


def choices_of(name: str) -> tuple[str, ...]:
    """A field's allowed values; empty unless they are a list."""
    allowed = SETTINGS[name].allowed
    return allowed.choices if allowed else ()


def check_value(name: str, value: object, key: str | None = None) -> None:
    """Raises ConfigError unless the field accepts the value; `key` names the value's origin."""
    allowed = SETTINGS[name].allowed
    if allowed is None or (value is None and SETTINGS[name].default is None):
        return
    if not allowed.accepts(value):
        raise ConfigError.bad_value(key or flag_of(name), allowed.shown(value), allowed.in_words)
