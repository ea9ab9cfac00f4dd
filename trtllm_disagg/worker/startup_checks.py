"""The checks of a starting worker against the workers in discovery, in their order: `StartupChecks`.

Workers that serve one name serve one model, and workers at one endpoint one name (`ModelNameGuard`): requests for a
name, or at an endpoint, are sent to any of them. Prefill and decode workers of one deployment must be able to exchange
KV (`require_pair`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trtllm_disagg.admin.commands import DescribedInstance
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


@dataclass(eq=False)
class ModelNameGuard:
    """Finds workers that serve the name of `own` from another model, or another name at an endpoint of this worker.

    Two workers that start together first enter discovery and then list it, so at least one of them sees the other. A
    worker that has listed no conflict is settled, and stays; of two that are not settled, the lower id stays.
    """

    own: ModelIdentity
    own_id: int
    #: No other worker may serve another name here.
    own_endpoint_ids: Collection[str]
    #: Every worker that requests for a model could reach, this one included, with its description.
    list_instances: Callable[[], Awaitable[Sequence[DescribedInstance]]]
    poll_seconds: float = _POLL_SECONDS
    #: Discovery shows a worker itself within milliseconds. After this time the check goes on without that: the others
    #: would appear no later. A conflict that lasts as long is logged.
    visible_seconds: float = 5.0
    is_settled: bool = False

    def described(self) -> dict[str, Any]:
        """The model's part of this worker's description, as JSON."""
        return self.own.described() | {"settled": self.is_settled}

    async def require_same(self) -> None:
        """Run before this worker is in discovery. Raises ConfigError for the first worker that conflicts with it."""
        others = await self.list_instances()
        if not others:
            # A new discovery client may have received no instances yet.
            await asyncio.sleep(self.poll_seconds)
            others = await self.list_instances()
        for other in others:
            if self._conflicts(other):
                raise self._refusal(other)

    async def confirm(self) -> Sequence[DescribedInstance]:
        """Run between entering discovery and registering. Returns all workers listed, this one included. Raises
        ConfigError for a conflict in which this worker has to give way, and waits for the end of the other one else.
        """
        deadline = time.monotonic() + self.visible_seconds
        has_warned = False
        while True:
            instances = await self.list_instances()
            conflicts = [each for each in instances if self._conflicts(each)]
            for other in conflicts:
                if other.description.get("settled", True) or other.instance_id < self.own_id:
                    raise self._refusal(other)
            is_listed = any(each.instance_id == self.own_id for each in instances)
            is_late = time.monotonic() > deadline
            # Unsettled workers with a higher id find this one in discovery, and end.
            if not conflicts and (is_listed or is_late):
                break
            if conflicts and is_late and not has_warned:
                has_warned = True
                log.warning("waiting for a worker to end: %s", self._refusal(conflicts[0]))
            await asyncio.sleep(self.poll_seconds)
        self.is_settled = True
        return instances

    def _conflicts(self, other: DescribedInstance) -> bool:
        name, weights = other.description.get("model"), other.description.get("weights")
        if other.instance_id == self.own_id or None in (name, weights):
            return False
        if name == self.own.model and not may_share_kv(self.own.described(), other.description):
            return True
        is_beside = other.endpoint_id in self.own_endpoint_ids
        return is_beside and (name != self.own.model or self._has_other_callers(other))

    def _has_other_callers(self, other: DescribedInstance) -> bool:
        """One of the two is called by frontends, the other by workers. A frontend sends requests to both alike."""
        own = self.own.is_worker_side
        return bool(other.description.get("is_worker_side", own)) is not own

    def _refusal(self, other: DescribedInstance) -> ConfigError:
        own, found = self.own, other.description
        worker = f"{found.get('role')} {other.instance_id:x} at {other.endpoint_id}"
        if found["model"] != own.model:
            return ConfigError.bad_value(
                "--served-model-name",
                own.model,
                f"{found['model']!r}, which {worker} serves there already; give this one another --namespace, or "
                "stop that one first",
            )
        if found["weights"] == own.weights:
            return ConfigError(
                f"--namespace: {worker} is there under {found.get('strategy')}, where other workers call each other "
                "than here; give this one another --namespace, or stop that one first"
            )
        return ConfigError(
            f"--model: {_shown(own.source, own.weights)} is not allowed; expected what is served as "
            f"{own.model!r} already: {_shown(found.get('source'), found['weights'])}, by {worker}; give this one "
            "another --served-model-name and --namespace, or a --worker-revision, or stop that one first"
        )


def _shown(source: Any, weights: Any) -> str:
    return f"{source!r} (hash {weights})"


class PeerDirectory(Protocol):
    """The part of `dynamo_runtime.worker_endpoint.Runtime` that the checks use."""

    async def wait_for_second_stage(self, endpoint_id: str) -> None: ...

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class StartupChecks:
    """The three checks of a start, each named by the step that must not happen before it. All raise ConfigError, and
    list discovery anew, because other workers start at any time.
    """

    config: WorkerConfig
    names: ModelNameGuard
    peers: PeerDirectory

    async def before_loading(self) -> None:
        """Spares a worker that must not serve the minutes that its engine takes to load."""
        await self.names.require_same()

    async def before_listing(self, own: dict[str, Any]) -> None:
        """After it, other workers and frontends may send requests to this one. Finds the workers that started while
        the engine was loading. Under `--on-missing-stage fail` a first stage waits for the second one.
        """
        if self.config.next_endpoint_id is None:
            await self._require_fit(own)
        else:
            await self._require_second_stage(self.config.next_endpoint_id, own)
        await self.names.require_same()

    async def before_registering(self, own: dict[str, Any]) -> str:
        """After it, a frontend sends requests. Refuses one of two workers that started together and could not find each
        other before both were listed; also among peers at an endpoint of their own (`--next-endpoint`).

        Returns the strategy to run: a `switch` that ended before this worker was listed did not reach it.
        """
        listed = await self.names.confirm()
        strategy = await self._strategy_of_deployment(own)
        own = own | {"strategy": strategy}
        require_fit(own, [each.description for each in listed])
        await self._require_fit(own)
        return strategy

    async def _require_second_stage(self, endpoint_id: str, own: dict[str, Any]) -> None:
        peers = await self.peers.peer_descriptions(endpoint_id)
        if not peers and self.config.on_missing_stage == "fail":
            log.info("waiting for the second stage at %s", endpoint_id)
            # Discovery lists a dead instance for some seconds: only one that answers is there.
            while not peers:
                await self.peers.wait_for_second_stage(endpoint_id)
                await asyncio.sleep(_POLL_SECONDS)
                peers = await self.peers.peer_descriptions(endpoint_id)
        if not peers:
            log.info("no second stage at %s: this worker answers alone until one comes", endpoint_id)
        # Peers may run another strategy if they were switched to it: this worker will then run it, too.
        may_differ = ("strategy",) if self._follows_switches and were_switched(peers) else ()
        for peer in peers:
            require_pair(own, peer, ignored=may_differ)

    @property
    def _follows_switches(self) -> bool:
        return self.config.may_switch and not fixed_by(self.config)

    async def _strategy_of_deployment(self, own: dict[str, Any]) -> str:
        endpoint_id = self.config.peer_endpoint_id
        if endpoint_id is None or not self._follows_switches:
            return self.config.strategy
        return strategy_among(own, await self.peers.peer_descriptions(endpoint_id))

    async def _require_fit(self, own: dict[str, Any]) -> None:
        if self.config.peer_endpoint_id is not None:
            require_fit(own, await self.peers.peer_descriptions(self.config.peer_endpoint_id))
