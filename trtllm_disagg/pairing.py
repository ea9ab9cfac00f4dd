"""Do prefill and decode workers fit together? Asked before a worker registers the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from trtllm_disagg.config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.namesakes import ModelIdentity

#: What must be equal on both sides, and the setting that decides it.
_EQUAL = {
    "strategy": "--disaggregation-strategy",
    "schedule_style": "--schedule-style",
    "handoff_protocol": "--handoff-protocol",
    "prefill_dispatch": "--prefill-dispatch",
    "engine": "--engine",
    "block_size": "kv_cache_config.tokens_per_block (--kv-block-size)",
    "kv_dtype": "kv_cache_config.dtype",
    "dtype": "dtype",
    "transceiver": "cache_transceiver_config.backend",
    "model": "--served-model-name",
    "weights": "--model (hash of config.json and weights)",
}


#: What a running deployment may change.
_CHANGES = ("strategy",)


def describe_worker(
    config: WorkerConfig,
    engine_args: dict[str, Any],
    block_size: int,
    identity: ModelIdentity,
    ctx_info_endpoint: Sequence[str] = (),
) -> dict[str, Any]:
    """What the other stage has to know of this worker; JSON."""
    return identity.described() | {
        "role": config.role.value,
        "strategy": config.strategy.value,
        "schedule_style": config.schedule_style.value,
        "handoff_protocol": config.handoff_protocol,
        "prefill_dispatch": config.prefill_dispatch,
        "engine": config.engine,
        "block_size": block_size,
        "dtype": engine_args.get("dtype", "auto"),
        "kv_dtype": (engine_args.get("kv_cache_config") or {}).get("dtype", "auto"),
        "transceiver": (engine_args.get("cache_transceiver_config") or {}).get("backend"),
        "ctx_info_endpoint": list(ctx_info_endpoint),
    }


def kind_of(me: dict[str, Any]) -> str:
    """16 hexadecimal digits, the same for all workers that could serve one request together."""
    same = [me[key] for key in _EQUAL if key not in _CHANGES]
    return hashlib.blake2b(json.dumps(same).encode(), digest_size=8).hexdigest()


def require_pair(mine: dict[str, Any], theirs: dict[str, Any], but: Collection[str] = ()) -> None:
    """Raise ConfigError with one line per difference, in anything `but` what may differ."""
    differences = [
        f"{setting}: {mine['role']} {mine[key]!r}, {theirs.get('role')} {theirs.get(key)!r}"
        for key, setting in _EQUAL.items()
        if key not in but and mine[key] != theirs.get(key)
    ]
    if mine["role"] == theirs.get("role"):
        differences.insert(0, f"--disaggregation-mode: both workers are {mine['role']}")
    if differences:
        raise ConfigError("the two stages do not fit together; " + "; ".join(differences))


def require_fit(mine: dict[str, Any], others: Iterable[dict[str, Any]]) -> None:
    """The same for whoever else is there; workers of another model or strategy are none of our business."""
    for theirs in others:
        is_partner = {mine["role"], theirs.get("role")} == {Role.PREFILL, Role.DECODE}
        if is_partner and all(theirs.get(key) == mine[key] for key in ("model", "strategy")):
            require_pair(mine, theirs)


def require_callable(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The same for who comes later. While a deployment switches, its workers are under two strategies."""
    require_pair(mine, theirs, but=("strategy",))
