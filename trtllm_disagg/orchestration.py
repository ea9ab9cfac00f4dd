"""The settings of a worker that calls others."""

#: When a request's prefill leaves the worker that it was routed to.
DECIDERS = ("always", "length", "length_and_queue", "isl_bounding", "non_cached_tokens")

#: How a worker that calls others does so. No other worker has a use for these.
ORCHESTRATION = (
    "prefill_decider",
    "max_local_prefill_length",
    "max_prefill_queue_size",
    "eff_isl_threshold",
    "eff_isl_ratio_threshold",
    "non_cached_tokens",
    "policy_file",
    "next_router",
    "prefill_dispatch",
    "handoff_protocol",
    "on_missing_stage",
    "max_tries",
    "breaker_failures",
    "breaker_seconds",
    "queue_timeout",
    "prefill_timeout",
    "first_decode_token_timeout",
    "next_decode_token_timeout",
)
