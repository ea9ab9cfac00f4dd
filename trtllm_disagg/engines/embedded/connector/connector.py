"""KV transfer as the engine core sees it: the core calls a `KvConnector`, and gets its events from `poll`.

Decode reads a finished prefill's blocks (CONTEXT_FIRST), or offers its own for prefill to write into
(GENERATION_FIRST, docs/decisions/0006). The latter cannot deadlock: prefill waits for decode's offer without blocks and
without a place in the batch; decode, which holds both, waits only for prefill's work.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import NamedTuple

from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, LogprobEntry, TokenOutput
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.wire.kv_handle import KvHandle


class Offered(NamedTuple):
    """Decode's blocks are known: this prefill can be scheduled."""

    sequence: Sequence


class PrefixArrived(NamedTuple):
    """This prefill now has the first `num_fetchable` blocks of the prompt from decode's cache."""

    sequence: Sequence


class KvArrived(NamedTuple):
    """All KV of the prompt and the first token have arrived."""

    sequence: Sequence
    token: int
    logprobs: LogprobEntry | None
    #: Prompt tokens that prefill found in a cache.
    num_cached: int
    bytes_moved: int
    #: Prompt blocks found in this engine's cache.
    num_known: int


class ReadEnded(NamedTuple):
    """The request failed or was aborted, and its blocks are no longer written to."""

    sequence: Sequence


class HandedOff(NamedTuple):
    """Decode has received all KV and the first token."""

    output: TokenOutput
    bytes_moved: int


class KvFailed(NamedTuple):
    """The request cannot go on."""

    request_id: int
    error: DisaggError


class BlocksReleased(NamedTuple):
    """Blocks of an ended sequence that no transfer uses any more."""

    blocks: list[int]


class BlocksQuarantined(NamedTuple):
    """Blocks that must not be used: a late transfer with this peer may still write into them."""

    blocks: list[int]
    peer: str


class BlocksRestored(NamedTuple):
    """Quarantined blocks that nothing can write into any more."""

    blocks: list[int]


BlockEvent = BlocksReleased | BlocksQuarantined | BlocksRestored
KvEvent = Offered | PrefixArrived | KvArrived | ReadEnded | HandedOff | KvFailed | BlockEvent


class BlocksInTransfer:
    """The blocks of ended sequences that a transfer may still use, by transfer.

    Each is held, or quarantined if its transfer's end is unknown, and is freed exactly once.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, list[int]] = {}
        self._quarantined: dict[Hashable, list[int]] = {}

    @property
    def num_held(self) -> int:
        """Transfers with blocks that are not quarantined."""
        return len(self._held)

    def hold(self, transfer: Hashable, blocks: list[int]) -> None:
        self._held[transfer] = blocks

    def take_from(self, transfer: Hashable, blocks: Collection[int]) -> None:
        """Another transfer now accounts for these blocks, if this one held them."""
        if transfer in self._held:
            self._held[transfer] = [block for block in self._held[transfer] if block not in blocks]

    def quarantine(
        self, transfer: Hashable, peer: str, blocks: list[int] | None = None
    ) -> Iterator[BlockEvent]:
        """Quarantine `blocks` (default: those that the transfer holds)."""
        lost = self._held.pop(transfer, []) if blocks is None else blocks
        if lost:
            self._quarantined[transfer] = lost
            yield BlocksQuarantined(lost, peer)

    def free(self, transfer: Hashable) -> Iterator[BlockEvent]:
        """The transfer has ended: free the blocks that it holds, if any."""
        if held := self._held.pop(transfer, None):
            yield BlocksReleased(held)
        if quarantined := self._quarantined.pop(transfer, None):
            yield BlocksRestored(quarantined)


class KvConnector:
    """The engine core's thread calls it when a sequence begins and ends.

    This base class serves an engine without cache_transceiver_config, which refuses requests with a handoff.
    """

    #: The transport's name; "off" without one.
    transport = "off"

    @property
    def endpoint(self) -> str:
        """The endpoint of the control channel; empty without one."""
        return ""

    @property
    def num_leases(self) -> int:
        return 0

    @property
    def oldest_lease(self) -> float | None:
        """When the oldest lease was granted, by the monotonic clock; None without a lease."""
        return None

    @property
    def num_active(self) -> int:
        """Number of leases, prefills that wait for decode, and transfers that still use blocks."""
        return 0

    @property
    def has_news(self) -> bool:
        """True when `poll` has events although no transfer has ended."""
        return False

    def accept(self, request: AddRequest) -> KvHandle | None:
        """The handle of the request's handoff, if any. Raises a DisaggError for a phase that this engine cannot run."""
        return None

    def awaits_offer(self, sequence: Sequence) -> bool:
        """True for a prefill that must not be scheduled before `Offered`."""
        return False

    def start(self, sequence: Sequence) -> None:
        """Fetch KV from the peer into the sequence's blocks; `KvArrived` or `PrefixArrived` follows."""
        raise AssertionError("an engine without KV transfer has no peer to fetch KV from")

    def computed(self, sequence: Sequence) -> None:
        """More of the sequence's prompt has been computed."""

    def hand_off(self, sequence: Sequence, output: TokenOutput) -> bool:
        """Take over the blocks of a prefill that has its first token. Returns True if the caller should send `output`,
        now with the handoff, at once; False if `HandedOff` brings it later.
        """
        raise AssertionError("an engine without KV transfer takes no context_only request")

    def release(self, sequence: Sequence) -> list[int]:
        """Return the free blocks of a sequence that ended without a handoff. The others follow as `BlocksReleased`
        once no transfer uses them. Declines a handoff that it has not begun to read.
        """
        return sequence.blocks

    def decline(self, handle: KvHandle) -> None:
        """Tell the prefill engine that this handoff will not be read."""

    def abort(self, request_id: int) -> Sequence | None:
        """End a lease, or a prefill that waits for an offer; return the latter. The scheduler has neither."""
        return None

    def poll(self) -> Iterator[KvEvent]:
        """The events since the last call. Apply each event before taking the next."""
        return iter(())

    def seconds_to_deadline(self) -> float | None:
        """Seconds until the next lease or wait expires; None when there is none."""
        return None

    def close(self) -> None:
        """Stop all transfers."""
