"""Orders TensorRT-LLM's versions, says what changes with them, and names its step gauges."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from packaging.version import Version

from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)


class TrtllmVersion(Version):
    @classmethod
    def parse(cls, text: str, key: str = "--trtllm-version") -> TrtllmVersion:
        """A release or candidate, without its local part. Raises ConfigError, naming `key`, for other texts."""
        try:
            version = cls(text.partition("+")[0])
            if len(version.release) != 3 or version.is_devrelease or text.startswith("v"):
                raise ValueError
        except ValueError:
            raise ConfigError.bad_value(key, text, "a version of TensorRT-LLM such as 1.3.0rc29") from None
        return version


#: Installed by ai-dynamo 1.6.1 and this package's extra `tensorrt-llm`.
NEWEST_KNOWN = TrtllmVersion.parse("1.3.0rc29")
#: Since here `get_global_disagg_request_id` takes a node and a process, and context servers may overlap steps (PR
#: 10755).
OLDEST_SERVED = TrtllmVersion.parse("1.3.0rc22")
#: Since here there are `disagg_request_id` and the names that a worker imports; older versions are refused by name. Up
#: to rc21 the function makes handoff ids from one argument.
OLDEST_SUPPORTED = TrtllmVersion.parse("1.3.0rc5")
#: `kv_transfer_timeout_ms` is 60 s by default; 1.2 had no limit.
TRANSFERS_END_BY_DEFAULT = TrtllmVersion.parse("1.3.0rc22")
#: Since here, or earlier, transceiver_runtime "auto" is the Python transceiver if it can serve (PR 18248).
PYTHON_TRANSCEIVER_BY_DEFAULT = NEWEST_KNOWN
#: Since here a missing transceiver_runtime means PYTHON, not "auto" (the page of CacheTransceiverConfig).
PYTHON_UNLESS_GIVEN = TrtllmVersion.parse("1.4.0rc1")


def default_runtime(version: str | None) -> str:
    """The transceiver_runtime of a file that names none; unknown for custom builds."""
    with suppress(ConfigError):
        if version is not None and TrtllmVersion.parse(version) >= PYTHON_UNLESS_GIVEN:
            return "PYTHON"
    return "auto"


def require_supported(module: Any) -> None:
    """Raises ConfigError for a `tensorrt_llm` that is too old. Without a release's version it is a custom build."""
    try:
        version = TrtllmVersion.parse(str(getattr(module, "__version__", "")))
    except ConfigError:
        return
    if version < OLDEST_SUPPORTED:
        raise ConfigError.bad_value(
            "--engine",
            f"tensorrt_llm {version}",
            f"tensorrt_llm {OLDEST_SUPPORTED} or newer ({NEWEST_KNOWN} is what ai-dynamo 1.6.1 comes with): older ones "
            "have no disagg_request_id, and refuse context_only requests under the overlap scheduler",
        )
    if version < OLDEST_SERVED:
        log.warning(
            "TensorRT-LLM %s is older than %s, the oldest that doctor accepts", version, OLDEST_SERVED
        )


def installed_version() -> str | None:
    """This environment's TensorRT-LLM version, read without importing it; None if not installed."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


#: TensorRT-LLM's step gauges (metrics/collector.py, where each name begins with `trtllm_`), as GAUGE=KEY, by the part
#: of a `get_stats_async` record with the key. `step_gauges` adds the computed ones.
_GAUGES = {
    "": """
        num_requests_running=numActiveRequests num_requests_waiting=numQueuedRequests
        max_num_active_requests=maxNumActiveRequests gpu_memory_usage_bytes=gpuMemUsage
        cpu_memory_usage_bytes=cpuMemUsage pinned_memory_usage_bytes=pinnedMemUsage
        max_batch_size_static=maxBatchSizeStatic max_batch_size_runtime=maxBatchSizeRuntime
        max_num_tokens_runtime=maxNumTokensRuntime
    """,
    "kvCacheStats": """
        kv_cache_hit_rate=cacheHitRate kv_cache_max_blocks=maxNumBlocks kv_cache_free_blocks=freeNumBlocks
        kv_cache_used_blocks=usedNumBlocks kv_cache_tokens_per_block=tokensPerBlock
    """,
    "inflightBatchingStats": """
        num_context_requests=numContextRequests num_generation_requests=numGenRequests
        num_paused_requests=numPausedRequests num_scheduled_requests=numScheduledRequests
        total_context_tokens=numCtxTokens avg_decoded_tokens_per_iter=avgNumDecodedTokensPerIter
    """,
    "specDecodingStats": "spec_decode_acceptance_length=acceptanceLength spec_decode_draft_overhead=draftOverhead",
}
STEP_GAUGES = {part: dict(pair.split("=") for pair in pairs.split()) for part, pairs in _GAUGES.items()}


def step_gauges(stat: Mapping[str, Any]) -> dict[str, float]:
    """The values of TensorRT-LLM's gauges in a record of `get_stats_async`, without missing ones."""
    known: dict[str, float] = {}
    for part, gauges in STEP_GAUGES.items():
        values = (stat.get(part) or {}) if part else stat
        known |= {name: values[key] for name, key in gauges.items() if values.get(key) is not None}
    if (latency := stat.get("iterLatencyMS")) is not None:
        known["iteration_latency_seconds"] = latency / 1000
    blocks = stat.get("kvCacheStats") or {}
    windows = (stat.get("kvCacheIterationStats") or {}).values()
    reused, missed, held, room = (
        sum(window.get(key, 0) for window in windows)
        for key in ("iterReusedBlocks", "iterMissedBlocks", "secondaryUsedNumBlocks", "secondaryMaxNumBlocks")
    )
    shares = {
        "kv_cache_utilization": (blocks.get("usedNumBlocks", 0), blocks.get("maxNumBlocks")),
        "kv_cache_host_utilization": (held, room),
        "kv_cache_iter_reuse_rate": (reused, reused + missed),
    }
    return known | {name: part / whole for name, (part, whole) in shares.items() if whole}
