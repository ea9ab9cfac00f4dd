"""A prefill queue that nobody pulls from is no way to get an answer."""

from __future__ import annotations

from collections.abc import Collection

from trtllm_disagg.errors import NoInstanceError
from trtllm_disagg.handlers.remote import StageClient, StageInstance
from trtllm_disagg.types import GenerateRequest


class AttendedQueue:
    """A StageClient: the queue, as long as there is a prefill worker. Otherwise a request would wait in it for
    `--queue-timeout` before this worker serves it alone.
    """

    def __init__(self, queue: StageClient, workers: StageClient) -> None:
        self._queue = queue
        self._workers = workers

    def instance_ids(self) -> Collection[int]:
        return self._queue.instance_ids()

    def check(self, request: GenerateRequest) -> None:
        self._queue.check(request)

    async def pick(self, request: GenerateRequest) -> StageInstance:
        if not self._workers.instance_ids():
            raise NoInstanceError("no prefill worker is there to take anything from the queue")
        return await self._queue.pick(request)
