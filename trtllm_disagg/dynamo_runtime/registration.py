"""The place of a worker in its deployment: a first stage, which frontends call, or a second stage, which peers call."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from dynamo.common.utils.graceful_shutdown import get_grace_period_seconds

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.cards import Cards
from trtllm_disagg.dynamo_runtime.listing import Listing, ServedEndpoints
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.engine.readers import EngineReaders

log = logging.getLogger(__name__)

#: For a worker to see the others, for frontends to see its card, and to make the routers of a namespace that has just
#: got both roles: until then they refuse its requests.
_FRONTENDS_SECONDS = 0.5


class Place(Enum):
    """Where this worker is registered: never at both, since a frontend does not serve a model that both roles
    registered (docs/log/dynamo.md).
    """

    NONE, FRONTENDS, PEERS = auto(), auto(), auto()


@dataclass(eq=False)
class Registration:
    """Registers this worker with frontends, or with the KV routers of the other role, and takes it out of discovery.
    `enter`, `leave` and `stand_by` may be called again, as after one that failed.
    """

    config: WorkerConfig
    runtime: Runtime
    served: ServedEndpoints
    cards: Cards
    readers: EngineReaders
    place: Place = Place.NONE
    #: A renewal has failed on its way: some entries are still missing.
    is_half_renewed: bool = False

    def __post_init__(self) -> None:
        self.listing = Listing(self.runtime, self.served)
        self._front = self.config.frontend_endpoint_id

    async def list_for_peers(self) -> None:
        """Begin to serve, where peers call this worker; where none does, frontends find it after `enter`."""
        endpoint_id = self.config.worker_endpoint_id
        self.served.needed.add(endpoint_id)
        await self.listing.enter(endpoint_id)

    # -- what a switch needs

    async def enter(self) -> None:
        """Be a first stage. Raises what Dynamo raises."""
        if self.place is Place.FRONTENDS:
            return
        if self.place is Place.PEERS:
            await self.cards.remove_for_peers()
            self.place = Place.NONE
        await self._register()
        self.place = Place.FRONTENDS

    async def leave(self) -> None:
        """Be a second stage. Requests that are being sent are still answered: the model is removed first, and the
        instance after the grace period in which all frontends learn of that.
        """
        if self.place is Place.FRONTENDS:
            await self.cards.remove_from_frontends()
            if self.config.may_switch:
                self.served.needed.discard(self._front)
            await asyncio.sleep(get_grace_period_seconds())
            await self.listing.leave(self._front)
            self.place = Place.NONE
        await self.stand_by()

    async def stand_by(self) -> None:
        """Be a second stage, which frontends do not call."""
        if self.config.tells_peers and self.place is Place.NONE:
            await self.cards.put_for_peers()
            self.place = Place.PEERS

    async def _register(self) -> None:
        """Make this worker, which serves already, known to frontends, unless it has left discovery."""
        if self.listing.is_closed:
            return
        await self.listing.enter(self._front)
        await self.runtime.client(self._front)  # made now: a new client lists no instance at first
        needs = self.cards.kind.needs
        pause = _FRONTENDS_SECONDS if needs else 0
        await asyncio.sleep(pause)
        try:
            if needs and await self._is_alone():
                await self.cards.close_namespace()
                await asyncio.sleep(pause)
            await self.cards.put_at_frontends()
            await asyncio.sleep(pause)
        finally:
            await self.cards.open_namespace()
        if failure := self.served.failure_at(self._front):
            raise failure
        self.served.needed.add(self._front)

    async def _is_alone(self) -> bool:
        """Whether frontends know no other worker of its kind in this namespace. `_register` has made the client."""
        client = await self.runtime.client(self._front)
        return [*client.instance_ids()] == [self.runtime.instance_id]

    # -- what file discovery may have dropped

    async def is_lost(self) -> bool:
        return self.is_half_renewed or await self.listing.is_lost()

    async def renew(self) -> None:
        """Make every current entry in discovery again."""
        self.is_half_renewed = True
        await self.listing.renew()
        self.readers.events.renew()
        if self.place is Place.FRONTENDS:
            with suppress(Exception):
                await self.cards.remove_from_frontends()
            await self._register()
        if self.place is Place.PEERS:
            with suppress(Exception):
                await self.cards.remove_for_peers()
            await self.cards.put_for_peers()
        self.is_half_renewed = False

    # -- what a worker does that leaves

    @property
    def grace_seconds(self) -> float:
        """Frontends may still send requests for so long."""
        return float(get_grace_period_seconds())

    async def hide(self, *, closes_namespace: bool) -> bool:
        """Have frontends send nothing new here. They still reach this worker: they drop a request whose worker leaves
        discovery before it answers. Returns whether they knew it.
        """
        if not self.cards.are_at_frontends:
            return False
        if closes_namespace or await self._is_alone():
            await self.cards.close_namespace()
        else:
            await self.cards.remove_from_frontends()
        return True

    async def unlist(self) -> None:
        """Leave discovery, for good. Requests that run, or are being sent, are still answered."""
        self.listing.is_closed = True  # also where the next step hangs
        try:
            # First: a frontend serves no model while one of its cards has no instance.
            await self.cards.close()
        except Exception as error:
            log.warning("this worker's card cannot be removed from discovery: %s", error)
        await self.listing.close()
