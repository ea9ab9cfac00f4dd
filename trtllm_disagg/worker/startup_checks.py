"""The checks of a start against the workers that are there already, in their order: `StartupChecks`.

Workers that serve one name serve one model, and workers at one endpoint one name (`ModelNameGuard`): requests for a
name, or at an endpoint, are sent to any of them. Prefill and decode workers of one deployment have to be able to read
each other's KV (`require_pair`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from trtllm_disagg.commands import DescribedInstance
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.pairing import (
    ModelIdentity,
    fixed_by,
    may_share_kv,
    require_fit,
    require_pair,
    strategy_among,
    were_switched,
)

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
#: Discovery shows a worker to itself within milliseconds. If it does not, it shows the others no better later.
_VISIBLE_SECONDS = 5.0

#: Lists every worker that requests for a model could reach, this one too, with its description.
ListInstances = Callable[[], Awaitable[Sequence[DescribedInstance]]]


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

    async def confirm(self) -> Sequence[DescribedInstance]:
        """The same when others can see this worker, and before a frontend hears of it. Returns all that are seen with
        it. Raises ConfigError.
        """
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
        return instances

    def _conflicts(self, other: DescribedInstance) -> bool:
        name, weights = other.description.get("model"), other.description.get("weights")
        if other.instance_id == self._own_id or name is None or weights is None:
            return False
        if name == self._mine.model and not may_share_kv(self._mine.described(), other.description):
            return True
        is_beside = other.endpoint_id in self._own_endpoint_ids
        return is_beside and (name != self._mine.model or self._is_called_otherwise(other))

    def _is_called_otherwise(self, other: DescribedInstance) -> bool:
        """A frontend that goes round an endpoint would send requests to workers that only workers call."""
        mine = self._mine.is_worker_side
        return bool(other.description.get("is_worker_side", mine)) is not mine

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
        if theirs["weights"] == mine.weights:
            return ConfigError(
                f"--namespace: {worker} is there under {theirs.get('strategy')}, where other workers call each other "
                "than here; give this one another --namespace, or stop that one first"
            )
        return ConfigError(
            f"--model: {_shown(mine.source, mine.weights)} is not allowed; expected what is served as "
            f"{mine.model!r} already: {_shown(theirs.get('source'), theirs['weights'])}, by {worker}; give this one "
            "another --served-model-name and --namespace, or stop that one first"
        )


def _shown(source: Any, weights: Any) -> str:
    return f"{source!r} (hash {weights})"


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

    async def before_registering(self, me: dict[str, Any]) -> str:
        """From here on a frontend sends requests. Of two workers that started together and could not see each other
        before both were listed, one is refused here: it is among those that are seen with this worker itself. Those at
        the partners' endpoint, which this worker has watched since it was loaded, may be elsewhere.

        Returns the strategy to run: a `switch` that ended before this worker was listed could not tell it, and one that
        begins later finds it.
        """
        listed = await self._names.confirm()
        strategy = await self._strategy_of_deployment(me)
        me = me | {"strategy": strategy}
        require_fit(me, [each.description for each in listed])
        await self._require_fit(me)
        return strategy

    async def _second_stage_fits(self, endpoint_id: str, me: dict[str, Any]) -> bool:
        if self._config.on_missing_stage == "fail":
            second = await self._others.second_stage(endpoint_id)
            if second is not None:
                self._require_pairs(me, [await second.describe()])
            return second is not None
        partners = await self._others.partners(endpoint_id)
        if not partners:
            log.info("no second stage at %s: this worker answers alone until one comes", endpoint_id)
        self._require_pairs(me, partners)
        return True

    def _require_pairs(self, me: dict[str, Any], partners: Sequence[dict[str, Any]]) -> None:
        """Switched while this worker loaded, they are no misfit: it will run what they do."""
        may_differ = ("strategy",) if self._follows_switches and were_switched(partners) else ()
        for theirs in partners:
            require_pair(me, theirs, but=may_differ)

    @property
    def _follows_switches(self) -> bool:
        return self._config.may_switch and not fixed_by(self._config)

    async def _strategy_of_deployment(self, me: dict[str, Any]) -> str:
        endpoint_id = self._config.partner_endpoint_id
        if endpoint_id is None or not self._follows_switches:
            return self._config.strategy
        return strategy_among(me, await self._others.partners(endpoint_id))

    async def _require_fit(self, me: dict[str, Any]) -> None:
        if self._config.partner_endpoint_id is not None:
            require_fit(me, await self._others.partners(self._config.partner_endpoint_id))
