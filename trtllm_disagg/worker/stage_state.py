"""Makes a serving worker its deployment's first or second stage."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.registration import Place, Registration
from trtllm_disagg.errors import InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.live_state import KV_OCCUPANCY, LiveState
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.types import InProgress
from trtllm_disagg.worker.life import Action, Event, Life
from trtllm_disagg.worker.pairing import WAS_SWITCHED, fixed_by

if TYPE_CHECKING:
    from trtllm_disagg.handlers.peers import Peers

log = logging.getLogger(__name__)


@dataclass(eq=False)
class StageState:
    """A worker's stage, and its changes. `live.strategy`: the deployment's, as far as the worker knows."""

    config: WorkerConfig
    life: Life
    live: LiveState
    #: Used only on workers that may switch.
    peers: Peers
    registration: Registration
    #: This engine's.
    max_seq_len: int | None
    #: Running requests from frontends; `switch` waits until an old first stage has none.
    client_requests: InProgress = field(default_factory=InProgress)
    #: Held during a change of strategy or registration.
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        #: Stays true after a switch back: workers started in between have the earlier strategy.
        self._was_switched = self.live.strategy.value != self.config.strategy

    def describe(self) -> dict[str, Any]:
        """The changing part of this worker's description, as JSON."""
        occupancy = {KV_OCCUPANCY: self.live.occupancy.share} if self.config.publish_metrics else {}
        return occupancy | {
            "strategy": self.live.strategy.value,
            WAS_SWITCHED: self._was_switched,
            "registered": self.registration.place is Place.FRONTENDS,
            "client_requests": self.client_requests.count,
            "queued_requests": self.live.queued.requests,
            "queued_tokens": self.live.queued.tokens,
            "fixed_by": fixed_by(self.config),
        }

    async def apply(self, strategy: str) -> None:
        """Become this role's stage under `strategy`, to which others may have been switched during this start. A switch
        that this worker has executed stays in force. Raises what registering raises.
        """
        async with self.changing:
            live = self.live.strategy
            if not self._was_switched and strategy != live.value:
                live.value = strategy
                self._was_switched = True
                was = self.config.strategy
                log.info("the other workers were switched meanwhile: %s instead of %s", strategy, was)
            if self.config.role is Role.AGG or self._is_first(self.live.strategy.value):
                await self.registration.enter()
            else:
                await self.registration.stand_by()

    async def renew(self, *, only_if_lost: bool = False) -> None:
        """Enter file discovery again, which may have dropped this worker."""
        async with self.changing:
            if only_if_lost and not await self.registration.is_lost():
                return
            if self.life.happened(Event.AWAKE) is Action.RENEW:
                log.warning("discovery has dropped this worker: entering again")
                await self.registration.renew()

    async def switch(self, to: str) -> None:
        """Become this role's stage under the strategy `to`. On a DisaggError nothing has changed."""
        config, strategy = self.config, self.live.strategy
        if not config.may_switch:
            raise InvalidRequestError(
                f"to: {to!r} is not allowed in mode {config.role} under {config.strategy}; "
                "expected no switch: such a worker runs nothing else"
            )
        if flags := fixed_by(config):
            raise InvalidRequestError(
                f"to: {to!r} is not allowed with {' and '.join(flags)}; expected the usual endpoints, where "
                "frontends and peers look for a switched worker"
            )
        async with self.changing:
            was = strategy.value
            # A first stage keeps its strategy while registered, so that no request meets another one.
            if self._is_first(to):
                await self._require_pair(to)
                strategy.value = to
                try:
                    await self.registration.enter()
                except BaseException:
                    strategy.value = was
                    await self._stand_by_again()
                    raise
            else:
                await self.registration.leave()
                strategy.value = to
        self._was_switched |= was != to
        log.info("switched from %s to %s: %s stage", was, to, "first" if self._is_first(to) else "second")

    async def _stand_by_again(self) -> None:
        """After a failed entry, restore this worker's card at the KV routers of the other role."""
        try:
            await self.registration.stand_by()
        except Exception as error:
            log.warning("the KV routers of the other role do not know this worker: %s", error)

    def _is_first(self, strategy: str) -> bool:
        return spec_of(strategy).entry_role in (self.config.role, None)

    async def _require_pair(self, to: str) -> None:
        """A frontend takes a model's context length from its first card, and refuses later cards with another one."""
        if not self.peers.instance_ids():
            place = self.config.peer_endpoint_id
            raise PeerUnavailableError(f"no worker of the other role is at {place}")
        await self.peers.learn()
        own = self.max_seq_len
        others = {facts.max_seq_len for facts in self.peers.facts()} - {None, own}
        if own is not None and others:
            other = min(filter(None, others))
            raise InvalidRequestError(
                f"to: {to!r} is not allowed with max_seq_len {own} on this worker and {other} on the other role's; "
                "expected the same: a frontend keeps one context length for a model"
            )
