"""Serves a worker's endpoints, and lists them in discovery."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.cards import card_type_for_frontends
from trtllm_disagg.dynamo_runtime.discovery import DiscoveryFiles
from trtllm_disagg.dynamo_runtime.handler import Handler, health_check_payload
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.errors import PeerUnavailableError

log = logging.getLogger(__name__)


class ServedEndpoints:
    """Serves each endpoint from its first listing to the runtime's end, listed or not."""

    def __init__(self, config: WorkerConfig, runtime: Runtime) -> None:
        """Raises ConfigError if --health-check-payload is no valid request."""
        self._config = config
        self._runtime = runtime
        self._health_check = health_check_payload(config.health_check_payload)
        self._handler: Handler | None = None
        #: By endpoint id.
        self._serving: dict[str, asyncio.Future[None]] = {}
        #: Ids of the endpoints that this worker needs now.
        self.needed: set[str] = set()
        self._has_ended = asyncio.Event()

    async def answer_with(self, handler: Handler) -> None:
        """Call this before the first entry."""
        self._handler = handler
        # Missing before Dynamo 1.6; None for some worker types.
        if source_for := getattr(self._runtime.endpoint_for_frontends, "first_token_source", None):
            handler.first_tokens = await source_for(card_type_for_frontends(self._config).worker_type)

    def release(self) -> None:
        """Release the role term."""
        if self._handler is not None:
            self._handler.release()

    def is_serving(self, endpoint_id: str) -> bool:
        return endpoint_id in self._serving

    def serve(self, endpoint_id: str, on_failure: Callable[[], object]) -> None:
        """Answer requests at an endpoint; Dynamo also lists it."""
        serving = self._serving[endpoint_id] = asyncio.ensure_future(
            self._runtime.own[endpoint_id].serve_endpoint(
                self._handler and self._handler.function,
                graceful_shutdown=True,
                metrics_labels=[(label, self._config.model_name) for label in ("model", "model_name")],
                health_check_payload=self._health_check,
            )
        )
        serving.add_done_callback(partial(self._on_end, endpoint_id, on_failure))

    def _on_end(self, endpoint_id: str, on_failure: Callable[[], object], _: object) -> None:
        if failure := self.failure_at(endpoint_id):
            log.error("this worker can no longer be called at %s: %s", endpoint_id, failure)
            on_failure()
        self._has_ended.set()

    def failure_at(self, endpoint_id: str) -> BaseException | None:
        """Why the endpoint is no longer served."""
        serving = self._serving.get(endpoint_id)
        if serving is None or not serving.done() or serving.cancelled():
            return None
        return serving.exception()

    async def until_ended(self) -> None:
        """Wait for the end of all endpoints, later ones too. Raises a needed endpoint's failure."""
        while not all(each.done() for each in self._serving.values()):
            await self._has_ended.wait()
            self._has_ended.clear()
            for failure in map(self.failure_at, self.needed):
                if failure:
                    raise failure


class Listing:
    """The endpoints where discovery lists this worker; none after `close`."""

    def __init__(self, runtime: Runtime, served: ServedEndpoints) -> None:
        self._runtime, self._served = runtime, served
        self._files = DiscoveryFiles(runtime.instance_id)
        self._listed: set[str] = set()
        self.is_closed = False

    def __contains__(self, endpoint_id: str) -> bool:
        return endpoint_id in self._listed

    async def enter(self, endpoint_id: str) -> None:
        """Answer requests at an endpoint, and list it. Raises PeerUnavailableError if it failed before, since Dynamo
        does not serve it again.
        """
        if failure := self._served.failure_at(endpoint_id):
            why = f"before it is restarted; it failed there: {failure}"
            raise PeerUnavailableError(f"this worker cannot be called at {endpoint_id} {why}")
        if endpoint_id in self._listed or self.is_closed:
            return
        if self._served.is_serving(endpoint_id):
            await self._enter(endpoint_id)
        else:
            self._listed.add(endpoint_id)
            self._served.serve(endpoint_id, on_failure=partial(self._listed.discard, endpoint_id))

    async def _enter(self, endpoint_id: str) -> None:
        await self._runtime.own[endpoint_id].register_endpoint_instance()
        self._listed.add(endpoint_id)
        if self.is_closed:  # meanwhile
            await self.close()

    async def leave(self, endpoint_id: str) -> None:
        if endpoint_id in self._listed:
            await self._runtime.own[endpoint_id].unregister_endpoint_instance()
            self._listed.discard(endpoint_id)

    async def renew(self) -> None:
        """Enter discovery again. An endpoint that is still listed disappears for a moment."""
        for endpoint_id in [*self._listed]:
            with suppress(Exception):
                await self._runtime.own[endpoint_id].unregister_endpoint_instance()
            if not self.is_closed:
                await self._enter(endpoint_id)

    async def is_lost(self) -> bool:
        """Whether file discovery has dropped an entry."""
        return await asyncio.to_thread(self._files.has_lost, [*self._listed])

    async def close(self) -> None:
        """Remove this worker from discovery for good. Requests that run or are in flight are still answered."""
        self.is_closed = True
        removals = [self._runtime.own[each].unregister_endpoint_instance() for each in self._listed]
        self._listed.clear()
        for outcome in await asyncio.gather(*removals, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("cannot remove this worker from discovery: %s", outcome)


_POLL_SECONDS = 1.0
#: Dynamo's file discovery drops a process that did not touch its files for 10 s.
_LONG_SECONDS = 5.0
_RETRY_SECONDS = 5.0


def _clock() -> float:
    """A clock that also counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def keep_in_discovery(
    renew: Callable[[], Awaitable[None]],
    renew_if_lost: Callable[[], Awaitable[None]],
    clock: Callable[[], float] = _clock,
    poll_seconds: float = _POLL_SECONDS,
    retry_seconds: float = _RETRY_SECONDS,
) -> None:
    """Make a worker enter file discovery again, which drops some or all files of a process that did not touch them,
    because of the file system or a freeze (SIGSTOP, a paused machine). Never returns.
    """
    was_frozen = False
    while True:
        before = clock()
        await asyncio.sleep(poll_seconds)
        if (frozen := clock() - before - poll_seconds) >= _LONG_SECONDS:
            log.warning("this worker was frozen for %.0f s: entering discovery again", frozen)
            was_frozen = True
        try:
            await (renew if was_frozen else renew_if_lost)()
            was_frozen = False
        except Exception as error:
            failed = "entering discovery again failed: %s; trying again in %g s"
            log.warning(failed, error, retry_seconds)
            await asyncio.sleep(retry_seconds)
