"""Checks a starting worker against the workers in discovery, in the order of `StartupChecks`.

Workers of one name must serve one model, and workers at one endpoint one name (`ModelNameGuard`), since any of them may
get the requests. Prefill and decode workers of a deployment must be able to exchange KV (`require_pair`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.wire.old_names import with_new_keys
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
#: The number that Dynamo's worker uses of TensorRT-LLM's 1024 or more.
NUM_MACHINE_IDS = 1021


@dataclass(eq=False)
class ModelNameGuard:
    """Finds workers that serve `own`'s name from another model, or another name at this worker's endpoints, and claims
    a machine id.

    Two workers that start together first enter discovery, then list it, so at least one sees the other. A worker that
    found no conflict is settled and stays; of two unsettled ones the lower id stays.

    The machine id is part of the ids by which decode finds a prefill's KV. Workers that may meet must not share one:
    equal ids, of one millisecond and counter, end the decode engine. A worker claims it in its description; of two
    claimants the one that stays keeps it. Not covered: a handoff in the milliseconds between listing and `confirm`,
    workers that discovery hides from each other (a cut network, a frozen worker), and prefill workers of two namespaces
    that call decode in a third (`--next-endpoint`).
    """

    own: ModelIdentity
    own_id: int
    #: Endpoints where no worker may serve another name.
    own_endpoint_ids: Collection[str]
    #: All workers that a model's requests could reach, this one included, with descriptions.
    list_instances: Callable[[], Awaitable[Sequence[DescribedInstance]]]
    num_machine_ids: int = NUM_MACHINE_IDS
    poll_seconds: float = _POLL_SECONDS
    #: Discovery shows a worker itself within milliseconds. After this time the check goes on without it: the others
    #: would appear no later. A longer conflict is logged.
    visible_seconds: float = 5.0
    is_settled: bool = False
    machine_id: int = field(init=False)

    def __post_init__(self) -> None:
        self.machine_id = self.own_id % self.num_machine_ids

    def described(self) -> dict[str, Any]:
        """Model and machine id in this worker's description, as JSON."""
        return asdict(self.own) | {"settled": self.is_settled, "machine_id": self.machine_id}

    async def require_same(self) -> None:
        """Run before this worker is in discovery. Raises ConfigError for the first conflicting worker."""
        others = await self.list_instances()
        if not others:
            # A new discovery client may have no instances yet.
            await asyncio.sleep(self.poll_seconds)
            others = await self.list_instances()
        for other in others:
            if self._conflicts(other):
                raise self._refusal(other)
        self._shares_machine_id(others, others)

    async def confirm(self) -> Sequence[DescribedInstance]:
        """Run between entering discovery and registering. Returns all listed workers, this one included. In a conflict,
        raises ConfigError if this worker must give way; else waits for the other's end.
        """
        deadline = time.monotonic() + self.visible_seconds
        has_warned = False
        while True:
            instances = await self.list_instances()
            conflicts = [each for each in instances if self._conflicts(each)]
            for other in conflicts:
                if other.description.get("settled", True) or other.instance_id < self.own_id:
                    raise self._refusal(other)
            prevailing = [
                each
                for each in instances
                if each.description.get("settled", True) or each.instance_id < self.own_id
            ]
            is_shared = self._shares_machine_id(prevailing, instances)
            is_listed = any(each.instance_id == self.own_id for each in instances)
            is_late = time.monotonic() > deadline
            # Unsettled workers with a higher id find this one, and end.
            if not conflicts and (is_late or (is_listed and not is_shared)):
                break
            if conflicts and is_late and not has_warned:
                has_warned = True
                log.warning("waiting for a worker to end: %s", self._refusal(conflicts[0]))
            await asyncio.sleep(self.poll_seconds)
        self.is_settled = True
        if self.machine_id in self._machine_ids(instances):
            log.warning(
                "another worker also has the machine id %d: only %d exist",
                self.machine_id,
                self.num_machine_ids,
            )
        return instances

    def _shares_machine_id(
        self, prevailing: Sequence[DescribedInstance], instances: Sequence[DescribedInstance]
    ) -> bool:
        """Whether another worker claims this machine id. If one of `prevailing` does, claim the next free id."""
        used = self._machine_ids(instances)
        is_shared = self.machine_id in used
        if self.machine_id in self._machine_ids(prevailing):
            own, count = self.machine_id, self.num_machine_ids
            after = (each % count for each in range(own + 1, own + count))
            self.machine_id = next((each for each in after if each not in used), own)
        return is_shared

    def _machine_ids(self, instances: Sequence[DescribedInstance]) -> set[object]:
        """The other workers' machine ids. Older versions report none, and derive them from instance ids."""
        return {
            each.description.get("machine_id", each.instance_id % self.num_machine_ids)
            for each in instances
            if each.instance_id != self.own_id and "model" in each.description
        }

    def _conflicts(self, other: DescribedInstance) -> bool:
        name, weights = other.description.get("model"), other.description.get("weights")
        if other.instance_id == self.own_id or None in (name, weights):
            return False
        if name == self.own.model and not may_share_kv(asdict(self.own), other.description):
            return True
        is_beside = other.endpoint_id in self.own_endpoint_ids
        return is_beside and (name != self.own.model or self._has_other_callers(other))

    def _has_other_callers(self, other: DescribedInstance) -> bool:
        """Frontends call one of the two, workers the other; but a frontend sends requests to both."""
        own = self.own.is_run_by_workers
        return bool(with_new_keys(other.description).get("is_run_by_workers", own)) is not own

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
                f"--namespace: {worker} serves there under {found.get('strategy')}, with other callers than under this "
                "worker's strategy; give this one another --namespace, or stop that one first"
            )
        return ConfigError(
            f"--model: {_shown(own.source, own.weights)} is not allowed; expected the model that {worker} serves as "
            f"{own.model!r}: {_shown(found.get('source'), found['weights'])}; give this one "
            "another --served-model-name and --namespace, or a --worker-revision, or stop that one first"
        )


def _shown(source: Any, weights: Any) -> str:
    return f"{source!r} (hash {weights})"


class PeerDirectory(Protocol):
    """The part of `worker_endpoint.Runtime` that the checks use."""

    async def wait_for_second_stage(self, endpoint_id: str) -> None: ...

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class StartupChecks:
    """The three checks of a start, each named by the step that must follow it. All raise ConfigError, and list
    discovery again, since other workers start at any time.
    """

    config: WorkerConfig
    names: ModelNameGuard
    peers: PeerDirectory

    async def before_loading(self) -> None:
        """Spare a misfit the minutes of loading its engine."""
        await self.names.require_same()

    async def before_listing(self, own: dict[str, Any]) -> None:
        """Find the workers that started while the engine was loading. Afterwards other workers and frontends may send
        requests. Under `--on-missing-stage fail` a first stage waits for a second one.
        """
        if self.config.next_endpoint_id is None:
            await self._require_fit(own)
        else:
            await self._require_second_stage(self.config.next_endpoint_id, own)
        await self.names.require_same()

    async def before_registering(self, own: dict[str, Any]) -> str:
        """Refuse one of two workers that started together, unseen until both were listed; also among peers at their own
        endpoint (`--next-endpoint`). Afterwards a frontend sends requests.

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
            # Discovery lists a dead instance for several seconds: only an answer counts.
            while not peers:
                await self.peers.wait_for_second_stage(endpoint_id)
                await asyncio.sleep(_POLL_SECONDS)
                peers = await self.peers.peer_descriptions(endpoint_id)
        if not peers:
            log.info("no second stage at %s: this worker answers alone until one comes", endpoint_id)
        # Peers may have been switched to another strategy: this worker will then run it, too.
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
