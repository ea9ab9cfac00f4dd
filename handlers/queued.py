"""Runs a prefill on the first prefill worker with room: the request waits in the prefill queue until then."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from trtllm_disagg.errors import NoInstanceError, QueueUnusableError
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.remote import RemotePrefill
from trtllm_disagg.types import Fallback, GenerateRequest, Handoff, PrefillPhase, RequestContext


class RequestQueue(Protocol):
    """The prefill queue (`prefill_queue.asking.Asking`)."""

    async def worker_with_room(
        self, request: GenerateRequest, context: RequestContext, takers: Callable[[], Collection[int]]
    ) -> int:
        """Wait until one of `takers` has room. Return its instance id; it now expects the call. Raises what `takers`
        raises, QueueUnusableError, StageTimeoutError, RequestCancelledError.
        """
        ...

    def depth(self) -> int:
        """The number of requests that wait for a prefill worker. Never waits."""
        ...


class PrefillQueue(NamedTuple):
    requests: RequestQueue
    #: The prefill workers that take the requests.
    workers: Peers


@dataclass(frozen=True, slots=True)
class QueuedPrefill:
    """Runs a prefill on the worker that the queue names. Requests that pin prefill workers skip the queue, and all do
    while NATS fails: they run `direct`.
    """

    queue: PrefillQueue
    at_worker: RemotePrefill
    direct: PrefillPhase
    #: While no prefill worker is in discovery, requests wait; else they get NoInstanceError.
    waits_for_workers: bool
    #: This worker, if `direct` prefills on its own engine.
    own_id: int | None = None
    pins_workers: Callable[[GenerateRequest], bool] = lambda request: False

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        worker = self.own_id
        if not self.pins_workers(request):
            try:
                worker = await self._worker(request, context)
            except QueueUnusableError as error:
                request.trace.fell_back(Fallback.DIRECT, error)
        if worker == self.own_id:
            return await self.direct(request, context)
        return await self.at_worker(request, context, worker)

    async def _worker(self, request: GenerateRequest, context: RequestContext) -> int:
        began, facts = time.monotonic(), request.trace.facts
        with request.span.child("queue_wait") as span:
            await self.queue.workers.learn()
            takers = partial(self._takers, request)
            worker = await self.queue.requests.worker_with_room(request, context, takers)
            facts["prefill_instance"] = name = f"{worker:x}"
            facts["prefill_queue_ms"] = round((time.monotonic() - began) * 1000, 1)
            span.note({"instance": name})
        return worker

    def _takers(self, request: GenerateRequest) -> Collection[int]:
        workers = self.queue.workers
        takers = workers.takers(request)
        if not takers and (workers.instance_ids() or not self.waits_for_workers):
            raise NoInstanceError("no prefill worker in discovery can take this request")
        return takers
