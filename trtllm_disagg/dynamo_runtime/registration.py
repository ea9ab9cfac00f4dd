"""Registers a worker as a first stage, which frontends call, or a second stage, which peers call."""

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

#: Settling time of discovery: workers see each other, and frontends see the card and create the routers of a namespace
#: that just got both roles; until then they refuse its requests.
_FRONTENDS_SECONDS = 0.5


class Place(Enum):
    """Where this worker is registered. Never at both: a frontend does not serve a model registered by both roles
    (docs/log/dynamo.md).
    """

    NONE, FRONTENDS, LEAVING, PEERS = auto(), auto(), auto(), auto()


@dataclass(eq=False)
class Registration:
    """Registers this worker with frontends or the other role's KV routers, and removes it from discovery. `enter`,
    `leave` and `stand_by` may be repeated, as after a failure.
    """

    config: WorkerConfig
    runtime: Runtime
    served: ServedEndpoints
    cards: Cards
    readers: EngineReaders
    place: Place = Place.NONE
    #: A renewal failed midway: some entries are missing.
    is_half_renewed: bool = False

    def __post_init__(self) -> None:
        self.listing = Listing(self.runtime, self.served)
        self._front = self.config.frontend_endpoint_id

    async def list_for_peers(self) -> None:
        """Begin to serve peers, if any call this worker; otherwise frontends find it after `enter`."""
        endpoint_id = self.config.worker_endpoint_id
        self.served.needed.add(endpoint_id)
        await self.listing.enter(endpoint_id)

    # -- what a switch needs

    async def enter(self) -> None:
        """Become a first stage. Raises what Dynamo raises."""
        if self.place is Place.FRONTENDS:
            return
        if self.place is Place.PEERS:
            await self.cards.remove_for_peers()
            self.place = Place.NONE
        await self._register()
        self.place = Place.FRONTENDS

    async def leave(self) -> None:
        """Become a second stage. Removes the model first, and the instance after the grace period in which all
        frontends learn of it: so requests in flight are still answered.
        """
        if self.place in (Place.FRONTENDS, Place.LEAVING):
            self.place = Place.LEAVING  # no longer described as a first stage that a switch can count on
            await self.cards.remove_from_frontends()
            if self.config.may_switch:
                self.served.needed.discard(self._front)
            await asyncio.sleep(get_grace_period_seconds())
            await self.listing.leave(self._front)
            self.place = Place.NONE
        await self.stand_by()

    async def stand_by(self) -> None:
        """Become a second stage, which frontends do not call."""
        if self.config.informs_peers and self.place is Place.NONE:
            await self.cards.put_for_peers()
            self.place = Place.PEERS

    async def _register(self) -> None:
        """Make this serving worker known to frontends, unless it has left discovery."""
        if self.listing.is_closed:
            return
        await self.listing.enter(self._front)
        await self.runtime.client(self._front)  # made now: a new client lists no instance at first
        needs = self.cards.card_type.needs
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
        """Whether frontends know no other worker of its card type here. `_register` made the client."""
        client = await self.runtime.client(self._front)
        return [*client.instance_ids()] == [self.runtime.instance_id]

    # -- what file discovery may have dropped

    async def is_lost(self) -> bool:
        return self.is_half_renewed or await self.listing.is_lost()

    async def renew(self) -> None:
        """Create every current entry in discovery again."""
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
        """Seconds in which frontends may still send requests."""
        return float(get_grace_period_seconds())

    async def stop_frontends(self, *, closes_namespace: bool) -> bool:
        """Stop new requests of frontends. The worker stays reachable, since frontends drop a request if its worker
        leaves discovery before it answers. Returns whether they knew it.
        """
        if not self.cards.are_at_frontends:
            return False
        if closes_namespace or await self._is_alone():
            await self.cards.close_namespace()
        else:
            await self.cards.remove_from_frontends()
        return True

    async def unlist(self) -> None:
        """Leave discovery for good. Requests that run or are in flight are still answered."""
        self.listing.is_closed = True  # even if the next step hangs
        try:
            # First: a frontend stops serving a model if one of its cards has no instance.
            await self.cards.close()
        except Exception as error:
            log.warning("cannot remove this worker's card from discovery: %s", error)
        await self.listing.close()
