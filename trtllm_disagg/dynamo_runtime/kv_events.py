"""Publishes the engine's KV cache events to the indexes of the frontend's router and of the peers' routers."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from trtllm_disagg.dynamo_runtime.polling import EVENTS_TIMEOUT, PollingPublisher
from trtllm_disagg.processes.reports import RateLimitedLog

log = logging.getLogger(__name__)


class EventSink(Protocol):
    """The part of Dynamo's KvEventPublisher that is used here."""

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


class EventSource(EventSink, Protocol):
    """Dynamo's KvEventPublisher: it has an entry in discovery, where routers find it, until `shutdown`."""

    def shutdown(self) -> None: ...


class _StoredBlock(NamedTuple):
    tokens: array[int]
    parent_hash: int | None
    cache_salt: str | None


class RenewableSource:
    """An EventSource that can enter discovery again, for file discovery may drop it and Dynamo does not write its entry
    again. The new entry's routers get all blocks that are stored now, because the engine tells of each block only once.
    """

    def __init__(self, open_source: Callable[[], EventSource]) -> None:
        self._open = open_source
        self._source = open_source()
        #: By block hash.
        self._blocks: dict[int, _StoredBlock] = {}
        #: Events come from a thread of their own, `renew` from the event loop.
        self._lock = threading.Lock()

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        with self._lock:
            self._source.publish_stored(
                token_ids, num_block_tokens, block_hashes, parent_hash, cache_salt=cache_salt
            )
            start, parent = 0, parent_hash
            for block_hash, count in zip(block_hashes, num_block_tokens, strict=True):
                tokens = array("q", token_ids[start : start + count])
                self._blocks[block_hash] = _StoredBlock(tokens, parent, cache_salt)
                start, parent = start + count, block_hash

    def publish_removed(self, block_hashes: list[int]) -> None:
        with self._lock:
            self._source.publish_removed(block_hashes)
            for block_hash in block_hashes:
                self._blocks.pop(block_hash, None)

    def renew(self, open_source: Callable[[], EventSource] | None = None) -> None:
        """`open_source`: in place of the one before, which was of another instance."""
        with self._lock:
            with suppress(Exception):  # it may be shut down already, by a renewal that failed then
                self._source.shutdown()
            self._open = open_source or self._open
            self._source = self._open()
            for block_hash in self._parents_first():
                tokens, parent, salt = self._blocks[block_hash]
                self._source.publish_stored(
                    tokens.tolist(), [len(tokens)], [block_hash], parent, cache_salt=salt
                )

    def _parents_first(self) -> Iterator[int]:
        """A router cannot place a block before its parent, which the engine may have dropped and stored once more."""
        children: dict[int | None, list[int]] = defaultdict(list)
        for block_hash, block in self._blocks.items():
            children[block.parent_hash].append(block_hash)
        waiting = children[None]
        while waiting:
            yield (block_hash := waiting.pop())
            waiting += children[block_hash]


class EventSources:
    """A worker's sources of cache events. One is renewable where discovery may drop it."""

    def __init__(self, *, may_be_dropped: bool) -> None:
        self._may_be_dropped = may_be_dropped
        self._renewable: dict[str, RenewableSource] = {}

    def open(self, name: str, open_source: Callable[[], EventSource]) -> EventSink:
        """A name that was open before has what it had."""
        if not self._may_be_dropped:
            return open_source()
        if name in self._renewable:
            self._renewable[name].renew(open_source)
        else:
            self._renewable[name] = RenewableSource(open_source)
        return self._renewable[name]

    def renew(self) -> None:
        for source in self._renewable.values():
            source.renew()


class KvEventForwarder(PollingPublisher):
    """Polls the engine for KV cache events, and forwards them to the sinks of their attention-DP rank's cache."""

    def __init__(
        self, llm: Any, ranks: Sequence[EventsOfRank], polled: Callable[[int], None] = lambda count: None
    ) -> None:
        """`polled` is called with the number of events of each poll."""
        super().__init__("kv-events")
        self._llm = llm
        self._ranks = ranks
        self._polled = polled
        self._warn = RateLimitedLog(log)

    def records(self) -> AsyncIterator[dict[str, Any]]:
        events: AsyncIterator[dict[str, Any]] = self._llm.get_kv_cache_events_async(timeout=EVENTS_TIMEOUT)
        return events

    def publish(self, records: list[dict[str, Any]]) -> None:
        self._polled(len(records))
        for event in records:
            try:
                self._ranks[event.get("attention_dp_rank") or 0].forward(event)
            except Exception as error:
                # Losing this event makes the router's index wrong; losing those after it would make it worse.
                self._warn(
                    "kv-events: an event of the engine cannot be published: %s: %.200s: %.200s",
                    type(error).__name__,
                    error,
                    event,
                )


class EventsOfRank:
    """Publishes the events of one rank. Only full blocks are published: the router cannot use a part of one."""

    def __init__(
        self,
        sinks: Sequence[EventSink],
        block_size: int,
        on_gap: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`on_gap` is called with the number of events that were lost."""
        self._on_gap = on_gap
        self._sinks = sinks
        self._block_size = block_size
        #: Blocks stored without an event, so that their removal has none either.
        self._unknown: set[int | str] = set()
        self._next_event_id: int | None = None
        self._window = 0
        self._warn = RateLimitedLog(log)

    def forward(self, event: dict[str, Any]) -> None:
        """Publish one event in TensorRT-LLM's format."""
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
        # Blocks after a part of a block have a parent that the router does not know.
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
        """A model with sliding windows sends each event once per window size; the widest one is published."""
        window = event.get("window_size") or 0
        self._window = max(self._window, window)
        return window == self._window

    def _note_gaps(self, event: dict[str, Any]) -> None:
        event_id = event.get("event_id")
        if event_id is None:
            return
        due = event_id if self._next_event_id is None else self._next_event_id
        if event_id != due:
            self._warn(
                "KV event %d came where %d was due: the router's view of this cache is stale; raise "
                "kv_cache_config.event_buffer_max_size",
                event_id,
                due,
            )
            self._on_gap(max(0, event_id - due))
        self._next_event_id = event_id + 1


class OnLoop:
    """Calls a sink in the event loop that serves requests, for a publisher that runs in another thread."""

    def __init__(self, sink: EventSink, loop: asyncio.AbstractEventLoop) -> None:
        self._sink = sink
        self._loop = loop

    def publish_stored(self, *args: Any, **keywords: Any) -> None:
        self._loop.call_soon_threadsafe(partial(self._sink.publish_stored, *args, **keywords))

    def publish_removed(self, block_hashes: list[int]) -> None:
        self._loop.call_soon_threadsafe(self._sink.publish_removed, block_hashes)


def signed(block_hash: int | str) -> int:
    """The engine's unsigned 64 bits, or the start of its SHA-256 in hexadecimal, as a signed number."""
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - (1 << 64) if number >= 1 << 63 else number
