"""The endpoints at which a worker answers, and where it is listed in discovery."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.cards import kind_for_frontends
from trtllm_disagg.dynamo_runtime.discovery import DiscoveryFiles
from trtllm_disagg.dynamo_runtime.handler import Handler, health_check_payload
from trtllm_disagg.dynamo_runtime.worker_endpoint import Runtime
from trtllm_disagg.errors import PeerUnavailableError

log = logging.getLogger(__name__)


class ServedEndpoints:
    """Each is served from its first entry into discovery to the runtime's end, whether it is listed or not."""

    def __init__(self, config: WorkerConfig, runtime: Runtime) -> None:
        """Raises ConfigError when --health-check-payload is no valid request."""
        self._config = config
        self._runtime = runtime
        self._health_check = health_check_payload(config.health_check_payload)
        self._handler: Handler | None = None
        #: By endpoint id.
        self._serving: dict[str, asyncio.Future[None]] = {}
        #: Ids of the endpoints without which this worker is of no use now.
        self.needed: set[str] = set()
        self._has_ended = asyncio.Event()

    async def answer_with(self, handler: Handler) -> None:
        """Before the first entry."""
        self._handler = handler
        # Cheaper than to be asked for each chunk. But a decode worker, whose chunks another worker may relay, makes
        # fewer of them when it is asked.
        handler.pushes = self._config.role is not Role.DECODE or not self._config.strategy_spec.is_worker_side
        # Missing before Dynamo 1.6; None for worker types that have none.
        if source_for := getattr(self._runtime.endpoint_for_frontends, "first_token_source", None):
            handler.first_tokens = await source_for(kind_for_frontends(self._config).worker_type)

    def release(self) -> None:
        """Let go of the role term."""
        if self._handler is not None:
            self._handler.release()

    def is_serving(self, endpoint_id: str) -> bool:
        return endpoint_id in self._serving

    def serve(self, endpoint_id: str, on_failure: Callable[[], object]) -> None:
        """Answer requests at an endpoint, which Dynamo also lists."""
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
            log.error("this worker cannot be called at %s: %s", endpoint_id, failure)
            on_failure()
        self._has_ended.set()

    def failure_at(self, endpoint_id: str) -> BaseException | None:
        """Why the endpoint is not served any more."""
        serving = self._serving.get(endpoint_id)
        if serving is None or not serving.done() or serving.cancelled():
            return None
        return serving.exception()

    async def until_ended(self) -> None:
        """Wait for the end of all endpoints, later ones too. Raises the failure of an endpoint that is needed."""
        while not all(each.done() for each in self._serving.values()):
            await self._has_ended.wait()
            self._has_ended.clear()
            for failure in map(self.failure_at, self.needed):
                if failure:
                    raise failure


class Listing:
    """The endpoints at which discovery lists this worker. After `close` it is listed nowhere."""

    def __init__(self, runtime: Runtime, served: ServedEndpoints) -> None:
        self._runtime, self._served = runtime, served
        self._files = DiscoveryFiles(runtime.instance_id)
        self._listed: set[str] = set()
        self.is_closed = False

    def __contains__(self, endpoint_id: str) -> bool:
        return endpoint_id in self._listed

    async def enter(self, endpoint_id: str) -> None:
        """Answer requests at an endpoint, and list it. Raises PeerUnavailableError if it failed before: Dynamo does not
        serve it again.
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
        """Enter again, which discovery may have forgotten. An endpoint still listed is gone for a moment."""
        for endpoint_id in [*self._listed]:
            with suppress(Exception):
                await self._runtime.own[endpoint_id].unregister_endpoint_instance()
            if not self.is_closed:
                await self._enter(endpoint_id)

    async def is_lost(self) -> bool:
        """Whether file discovery has dropped an entry."""
        return await asyncio.to_thread(self._files.has_lost, [*self._listed])

    async def close(self) -> None:
        """Remove this worker from discovery, for good. Requests that run, or are being sent, are still answered."""
        self.is_closed = True
        removals = [self._runtime.own[each].unregister_endpoint_instance() for each in self._listed]
        self._listed.clear()
        for outcome in await asyncio.gather(*removals, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("this worker cannot be removed from discovery: %s", outcome)


_POLL_SECONDS = 1.0
#: Dynamo's file discovery drops a process that has not touched its files for 10 s.
_LONG_SECONDS = 5.0
_RETRY_SECONDS = 5.0


def _clock() -> float:
    """A clock that also counts the time in which the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def keep_in_discovery(
    renew: Callable[[], Awaitable[None]],
    renew_if_lost: Callable[[], Awaitable[None]],
    clock: Callable[[], float] = _clock,
    poll_seconds: float = _POLL_SECONDS,
    retry_seconds: float = _RETRY_SECONDS,
) -> None:
    """Never returns. Has a worker enter file discovery again, which drops the files of a process that could not touch
    them: for a file system, or in a freeze (SIGSTOP, a paused machine), after which only some of them may be gone.
    """
    was_frozen = False
    while True:
        before = clock()
        await asyncio.sleep(poll_seconds)
        if (frozen := clock() - before - poll_seconds) >= _LONG_SECONDS:
            log.warning("this worker was frozen for %.0f s: it enters discovery again", frozen)
            was_frozen = True
        try:
            await (renew if was_frozen else renew_if_lost)()
            was_frozen = False
        except Exception as error:
            failed = "entering discovery again failed: %s; the next attempt is in %g s"
            log.warning(failed, error, retry_seconds)
            await asyncio.sleep(retry_seconds)
