"""KV transfer as the engine core sees it: calls go down to a `KvConnector`, events come up from `poll`.

Decode reads a finished prefill's blocks (CONTEXT_FIRST), or offers its own for prefill to write into
(GENERATION_FIRST, docs/decisions/0006). In the latter no side waits for the other while holding what the other may
need: prefill waits for decode's offer without blocks and without a place in the batch; decode, which holds both,
waits for prefill's work alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from trtllm_disagg.embedded.ipc.messages import AddRequest, LogprobEntry, TokenOutput
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import ConfigError, DisaggError, InvalidRequestError
from trtllm_disagg.kv_transfer.handle import KvHandle


@dataclass(frozen=True, slots=True)
class Offered:
    """Decode's blocks are known: this prefill can be scheduled."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class PrefixArrived:
    """What decode had of the prompt, `num_fetchable` blocks of it, is in this prefill's blocks."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class KvArrived:
    """All KV of the prompt is here, and the first token with it."""

    sequence: Sequence
    token: int
    logprobs: LogprobEntry | None
    #: Prompt tokens that prefill did not have to compute.
    num_cached: int
    bytes_moved: int
    #: Blocks that were here already.
    num_known: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The request has failed or was aborted: its blocks are not filled any more."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Decode has the KV that was written to it, and the first token."""

    output: TokenOutput
    bytes_moved: int


@dataclass(frozen=True, slots=True)
class KvFailed:
    """The request cannot go on."""

    request_id: int
    error: DisaggError


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """Their sequence has left them behind, and now no transfer uses them either."""

    blocks: list[int]


@dataclass(frozen=True, slots=True)
class BlocksQuarantined:
    """A late transfer with this peer may still write into these blocks: they are out of use."""

    blocks: list[int]
    peer: str


@dataclass(frozen=True, slots=True)
class BlocksRestored:
    """Nothing can be written into these quarantined blocks any more."""

    blocks: list[int]


BlockEvent = BlocksReleased | BlocksQuarantined | BlocksRestored
KvEvent = Offered | PrefixArrived | KvArrived | ReadEnded | HandedOff | KvFailed | BlockEvent


class BlocksInTransfer:
    """The one account of blocks that their sequence has left behind while a transfer may still use them.

    Its keys are the transfers, in whatever direction. A block is held, or quarantined once it is not known when its
    transfer ends, and comes free exactly once.
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
        """`blocks`, or those that the transfer holds."""
        lost = self._held.pop(transfer, []) if blocks is None else blocks
        if lost:
            self._quarantined[transfer] = lost
            yield BlocksQuarantined(lost, peer)

    def free(self, transfer: Hashable) -> Iterator[BlockEvent]:
        """It has ended. Nothing happens for one that has no blocks here."""
        if held := self._held.pop(transfer, None):
            yield BlocksReleased(held)
        if quarantined := self._quarantined.pop(transfer, None):
            yield BlocksRestored(quarantined)


class KvConnector:
    """Used by the engine core's thread. Every sequence passes here on its way in and out; most have no other half.

    As it is, disaggregation is off: no cache_transceiver_config, no handoffs.
    """

    #: Its name; "off" without one.
    transport = "off"

    @property
    def endpoint(self) -> str:
        """Of the control channel; empty without one."""
        return ""

    @property
    def num_leases(self) -> int:
        return 0

    @property
    def oldest_lease(self) -> float | None:
        """When it was granted, by the monotonic clock; None when there is none."""
        return None

    @property
    def num_active(self) -> int:
        """Leases, prefills that wait for their decode, and transfers that still use blocks."""
        return 0

    @property
    def has_news(self) -> bool:
        """`poll` has something to say although no transfer has ended."""
        return False

    def accept(self, request: AddRequest) -> KvHandle | None:
        """The handoff that the request continues, if it does. Raises a DisaggError for a request with another half
        that this engine cannot work with.
        """
        if request.rendezvous is not None:
            raise InvalidRequestError("this engine has no cache_transceiver_config, so it meets no other")
        if request.request_type == "generation_only":
            raise InvalidRequestError("this engine has no cache_transceiver_config, so it takes no handoffs")
        return None

    def awaits_offer(self, sequence: Sequence) -> bool:
        """True for a prefill that is not to be scheduled before `Offered`."""
        return False

    def start(self, sequence: Sequence) -> None:
        """It has its blocks, and wants KV from the other engine: `KvArrived`, or `PrefixArrived`, will come."""
        raise AssertionError("this engine has no other to get KV from")

    def computed(self, sequence: Sequence) -> None:
        """More of its prompt's KV is there."""

    def hand_off(self, sequence: Sequence, output: TokenOutput) -> bool:
        """A prefill has ended with its first token: take its blocks. True when the client hears of it now, with a
        handoff in `output`; False when that is for `HandedOff` to say.
        """
        raise ConfigError("this engine has no cache_transceiver_config, so it makes no handoffs")

    def release(self, sequence: Sequence) -> list[int]:
        """It has ended otherwise: the blocks that are free now. The others follow, as `BlocksReleased`, when no
        transfer uses them any more.
        """
        return sequence.blocks

    def decline(self, handle: KvHandle) -> None:
        """This handoff will not be read."""

    def abort(self, request_id: int) -> Sequence | None:
        """End what the scheduler does not know of: a lease, or a prefill that waits for its decode (returned)."""
        return None

    def poll(self) -> Iterator[KvEvent]:
        """What has happened since. Each event is to be applied before the next one is asked for."""
        return iter(())

    def seconds_to_deadline(self) -> float | None:
        """Until a lease or a wait ends by itself; None when there is none."""
        return None

    def close(self) -> None:
        """Nothing moves any more."""
