"""The engine's KV cache events -> the router's index (facts: trtllm.md section 4, dynamo.md section 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Protocol

from trtllm_disagg.publisher.base import PollingPublisher

log = logging.getLogger(__name__)

_WAIT_SECONDS = 2.0


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


class KvEventForwarder(PollingPublisher):
    """Only whole blocks are published: the router cannot place a request on a part of one."""

    def __init__(
        self,
        llm: Any,
        sinks: Sequence[EventSink],
        block_size: int,
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_gap` is told when events were lost."""
        super().__init__("kv-events")
        self._on_gap = on_gap
        self._llm = llm
        self._sinks = sinks
        self._block_size = block_size
        #: Blocks that the router was not told about, so that it is not told of their end either.
        self._unknown: set[int | str] = set()
        self._next_event_id: dict[int | None, int] = {}
        self._window = 0

    async def poll(self) -> None:
        async for event in self._llm.get_kv_cache_events_async(timeout=_WAIT_SECONDS):
            self.forward(event)

    def forward(self, event: dict[str, Any]) -> None:
        """One event of TensorRT-LLM's format."""
        self._note_gaps(event)
        if not self._is_of_widest_window(event):
            return
        data = event["data"]
        if data["type"] == "stored":
            self._stored(data)
        elif data["type"] == "removed":
            self._removed(data)

    def _stored(self, data: dict[str, Any]) -> None:
        blocks = data["blocks"]
        whole = list(takewhile(lambda block: len(block["tokens"]) == self._block_size, blocks))
        # What follows a part of a block hangs on something that the router does not know.
        self._unknown.update(block["block_hash"] for block in blocks[len(whole) :])
        if whole:
            parent = data["parent_hash"]
            token_ids = [token["token_id"] for block in whole for token in block["tokens"]]
            for sink in self._sinks:
                sink.publish_stored(
                    token_ids=token_ids,
                    num_block_tokens=[self._block_size] * len(whole),
                    block_hashes=[signed(block["block_hash"]) for block in whole],
                    parent_hash=None if parent is None else signed(parent),
                    cache_salt=whole[0].get("cache_salt"),
                )

    def _removed(self, data: dict[str, Any]) -> None:
        known = [block for block in data["block_hashes"] if block not in self._unknown]
        self._unknown.difference_update(data["block_hashes"])
        if known:
            for sink in self._sinks:
                sink.publish_removed([signed(block) for block in known])

    def _is_of_widest_window(self, event: dict[str, Any]) -> bool:
        """A model with sliding windows tells of every block once per window; one of them is enough."""
        window = event.get("window_size") or 0
        self._window = max(self._window, window)
        return window == self._window

    def _note_gaps(self, event: dict[str, Any]) -> None:
        event_id, rank = event.get("event_id"), event.get("attention_dp_rank")
        if event_id is None:
            return
        due = self._next_event_id.get(rank, event_id)
        if event_id != due:
            log.warning(
                "KV event %d came where %d was due: the router's view of this cache is stale; raise "
                "kv_cache_config.event_buffer_max_size",
                event_id,
                due,
            )
            self._on_gap()
        self._next_event_id[rank] = event_id + 1


def signed(block_hash: int | str) -> int:
    """The engine's unsigned 64 bits, or the start of its SHA-256 in hexadecimal, as a signed number."""
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number
