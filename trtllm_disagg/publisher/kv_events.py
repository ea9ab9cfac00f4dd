"""The engine's KV cache events -> the router's index (facts: trtllm.md section 4, dynamo.md section 4)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Protocol

log = logging.getLogger(__name__)

_WAIT_SECONDS = 2.0
_PAUSE_SECONDS = 0.01


class EventSink(Protocol):
    """Dynamo's KvEventPublisher, as far as we use it."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


class KvEventForwarder:
    """Only whole blocks are published: the router cannot place a request on a part of one."""

    def __init__(self, llm: Any, sink: EventSink, block_size: int) -> None:
        self._llm = llm
        self._sink = sink
        self._block_size = block_size
        self._partial: set[int] = set()
        self._next_event_id: int | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kv-events")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            async for event in self._llm.get_kv_cache_events_async(timeout=_WAIT_SECONDS):
                self.forward(event)
            # TensorRT-LLM answers at once when it has nothing.
            await asyncio.sleep(_PAUSE_SECONDS)

    def forward(self, event: dict[str, Any]) -> None:
        """One event of TensorRT-LLM's format."""
        self._note_gaps(event)
        data = event["data"]
        if data["type"] == "stored":
            self._stored(data)
        elif data["type"] == "removed":
            self._removed(data)

    def _stored(self, data: dict[str, Any]) -> None:
        whole: list[dict[str, Any]] = []
        for block in data["blocks"]:
            if len(block["tokens"]) < self._block_size:
                self._partial.add(block["block_hash"])
                break  # what follows would hang on a block that the router does not know
            whole.append(block)
        if whole:
            parent = data["parent_hash"]
            self._sink.publish_stored(
                token_ids=[token["token_id"] for block in whole for token in block["tokens"]],
                num_block_tokens=[len(block["tokens"]) for block in whole],
                block_hashes=[signed(block["block_hash"]) for block in whole],
                parent_hash=None if parent is None else signed(parent),
                cache_salt=whole[0].get("cache_salt"),
            )

    def _removed(self, data: dict[str, Any]) -> None:
        known = [block for block in data["block_hashes"] if block not in self._partial]
        self._partial.difference_update(data["block_hashes"])
        if known:
            self._sink.publish_removed([signed(block) for block in known])

    def _note_gaps(self, event: dict[str, Any]) -> None:
        event_id = event.get("event_id")
        if event_id is None:
            return
        if self._next_event_id is not None and event_id != self._next_event_id:
            log.warning(
                "KV events %d to %d were lost: the router's view of this cache is stale; raise "
                "kv_cache_config.event_buffer_max_size",
                self._next_event_id,
                event_id - 1,
            )
        self._next_event_id = event_id + 1


def signed(block_hash: int) -> int:
    """The engine's unsigned 64 bits as the router's signed ones."""
    return block_hash - (1 << 64) if block_hash >= 1 << 63 else block_hash
