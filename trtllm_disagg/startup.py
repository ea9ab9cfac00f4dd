"""Workers that serve one name serve one model, and workers at one endpoint one name. Asked before the engine is
built, and again until a worker serves: requests for a name, or at an endpoint, are sent to any of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_disagg.commands import Told
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError

_POLL_SECONDS = 0.05
#: Discovery shows a worker to itself within milliseconds. If it does not, it shows the others no better later.
_VISIBLE_SECONDS = 5.0

#: Everybody whom requests for a model could reach, this worker too, as they describe themselves.
Look = Callable[[], Awaitable[Sequence[Told]]]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    #: What clients call it.
    model: str
    #: Where it comes from: `--model`.
    source: str
    #: Hash of config.json and weights; of a model that the engine downloads itself, its name.
    weights: str

    def described(self) -> dict[str, Any]:
        return asdict(self)


class Namesakes:
    """The other workers that serve the name of `mine`, or another one where this worker is.

    Two that come at once list themselves, and only then look: so one of them, at least, sees the other. Who has
    looked and seen nobody is settled, and stays; of two that are not, the one with the lower id does.
    """

    def __init__(
        self,
        mine: ModelIdentity,
        own_id: int,
        places: Collection[str],
        look: Look,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """`places`: the endpoints of this worker; there nobody may serve another name."""
        self._mine = mine
        self._own_id = own_id
        self._places = places
        self._look = look
        self._poll_seconds = poll_seconds
        self._settled = False

    def described(self) -> dict[str, Any]:
        """JSON, a part of what this worker says of itself."""
        return self._mine.described() | {"settled": self._settled}

    async def require_same(self) -> None:
        """Before others can see this worker. Raises ConfigError for the first one that has another model or name."""
        others = await self._look()
        if not others:
            # A fresh look may come before discovery has told it anything.
            await asyncio.sleep(self._poll_seconds)
            others = await self._look()
        for other in others:
            if self._is_in_the_way(other):
                raise self._refusal(other)

    async def settle(self) -> None:
        """The same when they can, and before a frontend hears of it."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while True:
            everybody = await self._look()
            others = [each for each in everybody if self._is_in_the_way(each)]
            for other in others:
                if other.said.get("settled", True) or other.instance_id < self._own_id:
                    raise self._refusal(other)
            is_seen = any(each.instance_id == self._own_id for each in everybody)
            # Others who are in the way will see this one, and go.
            if not others and (is_seen or time.monotonic() > deadline):
                break
            await asyncio.sleep(self._poll_seconds)
        self._settled = True

    def _is_in_the_way(self, other: Told) -> bool:
        name, weights = other.said.get("model"), other.said.get("weights")
        if other.instance_id == self._own_id or name is None or weights is None:
            return False
        if name == self._mine.model:
            return bool(weights != self._mine.weights)
        return other.endpoint_id in self._places

    def _refusal(self, other: Told) -> ConfigError:
        mine, said = self._mine, other.said
        who = f"{said.get('role')} {other.instance_id:x} at {other.endpoint_id}"
        if said["model"] != mine.model:
            return ConfigError.bad_value(
                "--served-model-name",
                mine.model,
                f"{said['model']!r}, which {who} serves there already; give this one another --namespace, or stop "
                "that one first",
            )
        return ConfigError(
            f"--model: {_shown(mine.source, mine.weights)} is not allowed; expected what is served as "
            f"{mine.model!r} already: {_shown(said.get('source'), said['weights'])}, by {who}; give this one "
            "another --served-model-name and --namespace, or stop that one first"
        )


def _shown(source: Any, weights: Any) -> str:
    return f"{source!r} (hash {weights})"


# Do prefill and decode workers fit together? Asked before a worker registers the model.


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
