"""Every flag of a worker: the field it fills, its help, and the names by which Dynamo knows it."""

from __future__ import annotations

from typing import NamedTuple

from trtllm_disagg.config.worker_config import flag_of

ENV_PREFIX = "TRTLLM_DISAGG_"
#: Of the flag that stands for both publishers.
BOTH_PUBLISHERS_VARIABLE = "DYN_TRTLLM_PUBLISH_EVENTS_AND_METRICS"

# Where Dynamo reads the same setting: a variable of its TensorRT-LLM worker, of its runtime, or nowhere.
_WORKER = "DYN_TRTLLM_"
_RUNTIME = "DYN_"
_OURS_ONLY = ""


class Flag(NamedTuple):
    """One flag: the field it fills, its help, and the names by which Dynamo knows it."""

    field: str
    help: str
    dynamo_prefix: str = _WORKER
    aliases: tuple[str, ...] = ()
    more_variables: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables of this setting, the strongest first."""
        name = flag_of(self.field).removeprefix("--").replace("-", "_").upper()
        dynamo = (self.dynamo_prefix + name.removeprefix("DYN_"),) if self.dynamo_prefix else ()
        return (ENV_PREFIX + name, *dynamo, *self.more_variables)


FLAG_GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag("model", "path, or name on the Hugging Face hub", aliases=("--model-path",)),
        Flag("served_model_name", "name for clients (default: the value of --model)"),
        Flag("load_format", "how weights are loaded"),
    ),
    "disaggregation": (
        Flag("role", "the part of a request that this worker runs"),
        Flag("strategy", "the stage that takes requests and calls the other one", _OURS_ONLY),
        Flag(
            "schedule_style", "generation_first: both stages at once, KV is written as it is made", _OURS_ONLY
        ),
        Flag(
            "engine",
            "auto: tensorrt_llm where it is installed, else embedded; recording makes no real tokens (benchmarks)",
            _OURS_ONLY,
        ),
    ),
    "orchestration (first stage)": (
        Flag(
            "prefill_decider",
            "when a prefill is sent to a prefill worker, or stays where decode is",
            _OURS_ONLY,
        ),
        Flag("max_local_prefill_length", "max uncached tokens prefilled locally", _OURS_ONLY),
        Flag("max_prefill_queue_size", "waiting prefills from which on further ones stay local", _OURS_ONLY),
        Flag("eff_isl_threshold", "isl_bounding: max uncached tokens prefilled locally", _OURS_ONLY),
        Flag("eff_isl_ratio_threshold", "isl_bounding: max uncached fraction prefilled locally", _OURS_ONLY),
        Flag(
            "non_cached_tokens",
            "non_cached_tokens: uncached tokens from which on a prefill is remote",
            _OURS_ONLY,
        ),
        Flag(
            "policy_file",
            "YAML with the thresholds above; watched, so they change without restart",
            _OURS_ONLY,
        ),
        Flag("next_router", "how an instance of the second stage is chosen", _OURS_ONLY),
        Flag("prefill_dispatch", "direct, or a global queue on NATS JetStream", _OURS_ONLY),
        Flag("nats_server", "NATS servers of that queue", _OURS_ONLY, more_variables=("NATS_SERVER",)),
        Flag("handoff_protocol", "the shape of the bodies between the stages", _OURS_ONLY),
        Flag("on_missing_stage", "local: serve alone when no worker of the other role can", _OURS_ONLY),
        Flag("max_tries", "instances of the second stage to try for one request", _OURS_ONLY),
        Flag("breaker_failures", "failures in a row that trip an instance's circuit breaker", _OURS_ONLY),
        Flag("breaker_seconds", "seconds a tripped instance is skipped", _OURS_ONLY),
        Flag("queue_timeout", "max seconds a prefill waits in the queue", _OURS_ONLY),
        Flag("prefill_timeout", "max seconds of a prefill, waiting included", _OURS_ONLY),
        Flag("first_decode_token_timeout", "max seconds from handoff to decode's first token", _OURS_ONLY),
        Flag("next_decode_token_timeout", "max seconds between decode tokens", _OURS_ONLY),
    ),
    "overload": (
        Flag(
            "max_queued_requests",
            "max requests without a first token, further ones are refused with 529; 0: no bound "
            "(default: four batches, at least 256)",
            _OURS_ONLY,
        ),
        Flag(
            "max_queued_tokens",
            "max prompt tokens of requests without a first token, as above "
            "(default: one step of max_num_tokens for each request that may wait)",
            _OURS_ONLY,
        ),
    ),
    "endpoints and planes": (
        Flag("namespace", "Dynamo namespace", _RUNTIME),
        Flag("endpoint", "where this worker is reached, dyn://ns.component.endpoint", _RUNTIME),
        Flag("next_endpoint", "where the second stage is reached; first stage only", _OURS_ONLY),
        Flag("discovery_backend", "how workers find each other", _RUNTIME),
        Flag("request_plane", "how requests travel", _RUNTIME),
        Flag("event_plane", "how KV events travel", _RUNTIME),
        Flag(
            "drain_seconds",
            "seconds after SIGTERM for running requests; then other workers continue them",
            _OURS_ONLY,
        ),
        Flag(
            "frozen_seconds",
            "seconds until a worker stopped by SIGSTOP is killed, so that others continue; 0: never",
            _OURS_ONLY,
        ),
    ),
    "administration": (
        Flag(
            "admin_key_file",
            "key with which `switch` and `set` are signed (default: none, and they are refused)",
            _OURS_ONLY,
        ),
    ),
    "engine arguments": (
        Flag("extra_engine_args", "YAML file of engine arguments; a flag below wins over it"),
        Flag("override_engine_args", "JSON object laid over the YAML file and every flag"),
        Flag("tensor_parallel_size", "GPUs that share each layer"),
        Flag("pipeline_parallel_size", "groups of GPUs that share the layers"),
        Flag("expert_parallel_size", "GPUs that share the experts"),
        Flag("enable_attention_dp", "attention runs data-parallel instead of tensor-parallel"),
        Flag("gpus_per_node", "GPUs of one node (default: as found)"),
        Flag("kv_block_size", "tokens in one KV block"),
        Flag("max_batch_size", "requests in one step; on the embedded engine 64 unless given"),
        Flag("max_num_tokens", "tokens in one step; on the embedded engine 512 unless given"),
        Flag("max_seq_len", "tokens of one request, prompt and answer (default: the model's)"),
        Flag("max_beam_width", "beams of one request"),
        Flag("free_gpu_memory_fraction", "share of the free GPU memory that KV takes"),
        Flag("guided_decoding_backend", "library behind structured output"),
    ),
    "publishing": (
        Flag(
            "publish_kv_events",
            "tell the KV router which blocks this worker holds",
            more_variables=(BOTH_PUBLISHERS_VARIABLE,),
        ),
        Flag(
            "publish_metrics",
            "publish load and engine metrics",
            more_variables=(BOTH_PUBLISHERS_VARIABLE,),
        ),
    ),
    "API": (
        Flag(
            "endpoint_types",
            "chat, completions, both with a comma, or none",
            _RUNTIME,
            aliases=("--dyn-endpoint-types",),
        ),
        Flag("custom_jinja_template", "file of a chat template", _RUNTIME),
        Flag("tool_call_parser", "parser of tool calls", _RUNTIME),
        Flag("reasoning_parser", "parser of reasoning", _RUNTIME),
    ),
}
FLAGS = {flag.field: flag for group in FLAG_GROUPS.values() for flag in group}
