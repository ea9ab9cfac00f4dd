"""KV transfer as the engine core sees it: the core calls a `KvConnector`, and gets its events from `poll`.

Decode reads a finished prefill's blocks (CONTEXT_FIRST), or offers its own for prefill to write into
(GENERATION_FIRST, docs/decisions/0006). In the latter neither engine waits for the other while it holds what the other
may need: prefill waits for decode's offer without blocks and without a place in the batch; decode, which holds both,
waits for prefill's work alone.
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
    """The first `num_fetchable` blocks of the prompt, which decode had, are in this prefill's blocks."""

    sequence: Sequence


class PrefixLost(NamedTuple):
    """They do not come: this prefill has to compute them. Blocks of its own are left to be freed."""

    sequence: Sequence


class KvArrived(NamedTuple):
    """All KV of the prompt is here, and the first token."""

    sequence: Sequence
    token: int
    logprobs: LogprobEntry | None
    #: Prompt tokens that prefill did not have to compute.
    num_cached: int
    bytes_moved: int
    #: Prompt blocks that were in this engine's cache already.
    num_known: int


class ReadEnded(NamedTuple):
    """The request has failed or was aborted: its blocks are not filled any more."""

    sequence: Sequence


class HandedOff(NamedTuple):
    """Decode has the KV that was written to it, and the first token."""

    output: TokenOutput
    bytes_moved: int


class KvFailed(NamedTuple):
    """The request cannot go on."""

    request_id: int
    error: DisaggError


class BlocksReleased(NamedTuple):
    """The blocks of an ended sequence, which no transfer uses any more."""

    blocks: list[int]


class BlocksQuarantined(NamedTuple):
    """A late transfer with this peer may still write into these blocks: they must not be used."""

    blocks: list[int]
    peer: str


class BlocksRestored(NamedTuple):
    """Nothing can be written into these quarantined blocks any more."""

    blocks: list[int]


BlockEvent = BlocksReleased | BlocksQuarantined | BlocksRestored
KvEvent = Offered | PrefixArrived | PrefixLost | KvArrived | ReadEnded | HandedOff | KvFailed | BlockEvent


class BlocksInTransfer:
    """The blocks of ended sequences that a transfer may still use, by transfer.

    A block is held, or quarantined when it is not known when its transfer ends, and is freed exactly once.
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
        """The transfer holds these no longer, if it did: another one accounts for them."""
        if transfer in self._held:
            self._held[transfer] = [block for block in self._held[transfer] if block not in blocks]

    def quarantine(
        self, transfer: Hashable, peer: str, blocks: list[int] | None = None
    ) -> Iterator[BlockEvent]:
        """Quarantine `blocks`; without them, the blocks that the transfer holds."""
        lost = self._held.pop(transfer, []) if blocks is None else blocks
        if lost:
            self._quarantined[transfer] = lost
            yield BlocksQuarantined(lost, peer)

    def free(self, transfer: Hashable) -> Iterator[BlockEvent]:
        """The transfer has ended: free its blocks, if it has any here."""
        if held := self._held.pop(transfer, None):
            yield BlocksReleased(held)
        if quarantined := self._quarantined.pop(transfer, None):
            yield BlocksRestored(quarantined)


class KvConnector:
    """Used by the engine core's thread, for every sequence when it begins and ends.

    This base class is for an engine without cache_transceiver_config, whose API refuses requests with a handoff.
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
        """Leases, prefills that wait for their decode, and transfers that still use blocks."""
        return 0

    @property
    def has_news(self) -> bool:
        """True when `poll` has events although no transfer has ended."""
        return False

    def accept(self, request: AddRequest) -> KvHandle | None:
        """The handle of the handoff that the request continues, if any. Raises a DisaggError for a context_only or
        generation_only request that this engine cannot run.
        """
        return None

    def awaits_offer(self, sequence: Sequence) -> bool:
        """True for a prefill that must not be scheduled before `Offered`."""
        return False

    def start(self, sequence: Sequence) -> None:
        """Get KV into the sequence's blocks from the other engine; `KvArrived` or `PrefixArrived` follows."""
        raise AssertionError("an engine without KV transfer has no peer to fetch KV from")

    def computed(self, sequence: Sequence) -> None:
        """More of the sequence's prompt has been computed."""

    def hand_off(self, sequence: Sequence, output: TokenOutput) -> bool:
        """A prefill has ended with its first token: take over its blocks. True when `output`, now with the handoff, is
        to be sent at once; False when `HandedOff` brings it later.
        """
        raise AssertionError("an engine without KV transfer takes no context_only request")

    def release(self, sequence: Sequence) -> list[int]:
        """A sequence has ended without a handoff: return its blocks that are free now. The others follow as
        `BlocksReleased` when no transfer uses them any more. A handoff that it has not begun to read is declined.
        """
        return sequence.blocks

    def decline(self, handle: KvHandle) -> None:
        """Tell the prefill engine that this handoff will not be read: its request was not enqueued."""

    def abort(self, request_id: int) -> Sequence | None:
        """End what the scheduler does not have: a lease, or a prefill that waits for an offer (which is returned)."""
        return None

    def poll(self) -> Iterator[KvEvent]:
        """The events since the last call. The caller must apply each event before it takes the next one."""
        return iter(())

    def seconds_to_deadline(self) -> float | None:
        """Seconds until the next lease or wait expires; None when there is none."""
        return None

    def close(self) -> None:
        """Stop all transfers."""
