"""The checks of a start against the workers that are there already, in their order: `StartupChecks`.

Workers that serve one name serve one model, and workers at one endpoint one name (`ModelNameGuard`): requests for a
name, or at an endpoint, are sent to any of them. Prefill and decode workers of one deployment have to be able to read
each other's KV (`require_pair`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from trtllm_disagg.commands import DescribedInstance
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
#: Discovery shows a worker to itself within milliseconds. If it does not, it shows the others no better later.
_VISIBLE_SECONDS = 5.0

#: Lists every worker that requests for a model could reach, this one too, with its description.
ListInstances = Callable[[], Awaitable[Sequence[DescribedInstance]]]


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


class ModelNameGuard:
    """Finds workers that serve the name of `mine` from another model, or another name at an endpoint of this worker.

    Two workers that start together list themselves, and only then look: so one of them, at least, sees the other. A
    worker that has looked and seen no conflict is settled, and stays; of two that are not, the lower id stays.
    """

    def __init__(
        self,
        mine: ModelIdentity,
        own_id: int,
        own_endpoint_ids: Collection[str],
        list_instances: ListInstances,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        """No other worker may serve another name at `own_endpoint_ids`."""
        self._mine = mine
        self._own_id = own_id
        self._own_endpoint_ids = own_endpoint_ids
        self._list_instances = list_instances
        self._poll_seconds = poll_seconds
        self._settled = False

    def described(self) -> dict[str, Any]:
        """JSON, a part of this worker's description."""
        return self._mine.described() | {"settled": self._settled}

    async def require_same(self) -> None:
        """Before others can see this worker. Raises ConfigError for the first one that has another model or name."""
        others = await self._list_instances()
        if not others:
            # A fresh look may come before discovery has told it anything.
            await asyncio.sleep(self._poll_seconds)
            others = await self._list_instances()
        for other in others:
            if self._conflicts(other):
                raise self._refusal(other)

    async def confirm(self) -> None:
        """The same when others can see this worker, and before a frontend hears of it. Raises ConfigError."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while True:
            instances = await self._list_instances()
            conflicts = [each for each in instances if self._conflicts(each)]
            for other in conflicts:
                if other.description.get("settled", True) or other.instance_id < self._own_id:
                    raise self._refusal(other)
            is_seen = any(each.instance_id == self._own_id for each in instances)
            # Workers in conflict with a higher id will see this one, and go.
            if not conflicts and (is_seen or time.monotonic() > deadline):
                break
            await asyncio.sleep(self._poll_seconds)
        self._settled = True

    def _conflicts(self, other: DescribedInstance) -> bool:
        name, weights = other.description.get("model"), other.description.get("weights")
        if other.instance_id == self._own_id or name is None or weights is None:
            return False
        if name == self._mine.model:
            return bool(weights != self._mine.weights)
        return other.endpoint_id in self._own_endpoint_ids

    def _refusal(self, other: DescribedInstance) -> ConfigError:
        mine, theirs = self._mine, other.description
        worker = f"{theirs.get('role')} {other.instance_id:x} at {other.endpoint_id}"
        if theirs["model"] != mine.model:
            return ConfigError.bad_value(
                "--served-model-name",
                mine.model,
                f"{theirs['model']!r}, which {worker} serves there already; give this one another --namespace, or "
                "stop that one first",
            )
        return ConfigError(
            f"--model: {_shown(mine.source, mine.weights)} is not allowed; expected what is served as "
            f"{mine.model!r} already: {_shown(theirs.get('source'), theirs['weights'])}, by {worker}; give this one "
            "another --served-model-name and --namespace, or stop that one first"
        )


def _shown(source: Any, weights: Any) -> str:
    return f"{source!r} (hash {weights})"


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
) -> dict[str, Any]:
    """What other workers have to know of this one; JSON."""
    return identity.described() | {
        "role": config.role.value,
        "strategy": config.strategy,
        "schedule_style": config.schedule_style.value,
        "handoff_protocol": config.handoff_protocol,
        "prefill_dispatch": config.prefill_dispatch,
        "engine": config.engine,
        "block_size": block_size,
        "dtype": engine_args.get("dtype", "auto"),
        "kv_dtype": (engine_args.get("kv_cache_config") or {}).get("dtype", "auto"),
        "transceiver": (engine_args.get("cache_transceiver_config") or {}).get("backend"),
        "ctx_info_endpoint": [],
    }


def with_engine(me: dict[str, Any], block_size: int, ctx_info_endpoint: Sequence[str]) -> dict[str, Any]:
    """The description `me`, with what only the running engine knows: tokens per block, and its addresses."""
    return me | {"block_size": block_size, "ctx_info_endpoint": list(ctx_info_endpoint)}


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
    """Raises as `require_pair` for all of `others` that have the other role, and the same model and strategy."""
    for theirs in others:
        is_partner = {mine["role"], theirs.get("role")} == {Role.PREFILL, Role.DECODE}
        if is_partner and all(theirs.get(key) == mine[key] for key in ("model", "strategy")):
            require_pair(mine, theirs)


def require_callable(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises as `require_pair` for a worker that came later. During a switch the two may be under two strategies."""
    require_pair(mine, theirs, but=("strategy",))


class OtherWorkers(Protocol):
    """`dynamo_runtime.Runtime`, as far as the checks ask it."""

    async def second_stage(self, endpoint_id: str) -> Describes | None: ...

    async def partners(self, endpoint_id: str) -> list[dict[str, Any]]: ...


class Describes(Protocol):
    async def describe(self) -> dict[str, Any]: ...


class StartupChecks:
    """The three checks of a start, each named by what must not happen before it. All raise ConfigError.

    Each asks discovery anew, because other workers start at any time; its docstring says which race it closes.
    """

    def __init__(self, config: WorkerConfig, names: ModelNameGuard, others: OtherWorkers) -> None:
        self._config = config
        self._names = names
        self._others = others

    def described(self) -> dict[str, Any]:
        """JSON: the part of this worker's description that changes during its start."""
        return self._names.described()

    async def before_loading(self) -> None:
        """A worker that must not serve does not load an engine for minutes."""
        await self._names.require_same()

    async def before_listing(self, me: dict[str, Any]) -> bool:
        """From here on other workers and frontends may send requests to this one. Sees the workers that came while
        the engine was loading. Under `--on-missing-stage fail` a first stage waits for the second one; False when
        this worker was told to stop before that came.
        """
        if self._config.next_endpoint_id is None:
            await self._require_fit(me)
        elif not await self._second_stage_fits(self._config.next_endpoint_id, me):
            return False
        await self._names.require_same()
        return True

    async def before_registering(self, me: dict[str, Any]) -> None:
        """From here on a frontend sends requests. Of two workers that started together and could not see each other
        before both were listed, one is refused here.
        """
        await self._names.confirm()
        await self._require_fit(me)

    async def _second_stage_fits(self, endpoint_id: str, me: dict[str, Any]) -> bool:
        if self._config.on_missing_stage == "fail":
            second = await self._others.second_stage(endpoint_id)
            if second is not None:
                require_pair(me, await second.describe())
            return second is not None
        partners = await self._others.partners(endpoint_id)
        if not partners:
            log.info("no second stage at %s: this worker answers alone until one comes", endpoint_id)
        for theirs in partners:
            require_pair(me, theirs)
        return True

    async def _require_fit(self, me: dict[str, Any]) -> None:
        if self._config.partner_endpoint_id is not None:
            require_fit(me, await self._others.partners(self._config.partner_endpoint_id))
