"""The KV connector of an engine with a transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from trtllm_disagg.engines.embedded.connector.connector import (
    BlocksInTransfer,
    BlocksReleased,
    KvConnector,
    KvEvent,
)
from trtllm_disagg.engines.embedded.connector.sides import IncomingReads, IncomingWrites, OutgoingWrites
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, MadeHandoff, TokenOutput
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, KvTimeouts, KvTransport, prompt_digest
from trtllm_disagg.engines.embedded.kv_transfer.control import MessageHandlers
from trtllm_disagg.engines.embedded.kv_transfer.messages import (
    Failure,
    Notice,
    Offer,
    StillOffered,
    Watch,
    Withdraw,
)
from trtllm_disagg.engines.embedded.kv_transfer.peers import Peers
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvReceiver, KvSender
from trtllm_disagg.engines.embedded.kv_transfer.push import KvPusher, OfferBook
from trtllm_disagg.engines.embedded.kv_transfer.push_receiver import PushReceiver
from trtllm_disagg.engines.embedded.params.llm_args import CacheTransceiverConfig
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError
from trtllm_disagg.wire.kv_handle import KvHandle, decode_handle

log = logging.getLogger(__name__)


class TwoSidedConnector(KvConnector):
    """The engine may prefill for one engine and decode for another."""

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        num_blocks: int,
        *,
        timeouts: KvTimeouts,
        takes_offers: bool,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called from other threads when `poll` has events. `takes_offers` is False for an engine of several
        ranks, among which the blocks that prefill writes would have to be divided.
        """
        seconds, size = timeouts.transfer, layout.tokens_per_block
        self._transport = transport
        self._layout = layout
        self._takes_offers = takes_offers
        self.sender = KvSender(
            transport,
            layout,
            num_blocks,
            timeouts=timeouts,
            on_lease_ended=wake,
        )
        self.peers = Peers(transport, layout, timeouts=timeouts, on_change=wake)
        self.receiver = KvReceiver(self.peers, on_finished=wake)
        self.offers = OfferBook(layout.fingerprint(), wake, timeouts.stop)
        self.pusher = KvPusher(self.peers, on_finished=wake)
        self.push_receiver = PushReceiver(
            self.peers, on_news=wake, on_busy=self.sender.progress_thread.expect_peer
        )
        self._blocks = BlocksInTransfer()
        self._reads = IncomingReads(self.receiver, self.peers.late, self._blocks)
        self._incoming = IncomingWrites(self.push_receiver, self._blocks, self.endpoint, layout, seconds)
        self._outgoing = OutgoingWrites(
            self.offers, self.pusher, self.peers.late, self._blocks, size, seconds
        )
        self.sender.start(self._message_handlers(), lambda: self.push_receiver.is_busy)
        self.transport = transport.name
        log.info(
            "KV transfer by %s (leases and reads end after %g s) as %s, control channel %s",
            *(self.transport, seconds, self.sender.name, self.endpoint),
        )

    @property
    def endpoint(self) -> str:
        return self.sender.endpoint

    @property
    def num_leases(self) -> int:
        return len(self.sender.leases)

    @property
    def oldest_lease(self) -> float | None:
        return self.sender.leases.oldest()

    @property
    def num_active(self) -> int:
        """Without the requests that expect KV, which the scheduler counts."""
        return self.num_leases + self._outgoing.num_awaited + self._blocks.num_held

    @property
    def has_news(self) -> bool:
        return self._outgoing.has_news

    def accept(self, request: AddRequest) -> KvHandle | None:
        rendezvous = request.rendezvous
        if rendezvous is not None and not self._takes_offers:
            raise InvalidRequestError("schedule_style GENERATION_FIRST needs tensor_parallel_size 1")
        if rendezvous is None:
            return self._fitting_handle(request) if request.request_type == "generation_only" else None
        if request.request_type == "context_only" and self._outgoing.is_awaited(rendezvous.request):
            raise InvalidRequestError(f"disagg_request_id {rendezvous.request} is in use")
        return None

    def awaits_offer(self, sequence: Sequence) -> bool:
        is_pushed = sequence.rendezvous is not None and not sequence.is_generation_only
        if is_pushed:
            self._outgoing.await_offer(sequence)
        return is_pushed

    def start(self, sequence: Sequence) -> None:
        if sequence.rendezvous is None:
            self._reads.start(sequence)
        elif sequence.is_generation_only:
            self._incoming.start(sequence)
        else:
            self._outgoing.start(sequence)

    def computed(self, sequence: Sequence) -> None:
        self._outgoing.computed(sequence)

    def hand_off(self, sequence: Sequence, output: TokenOutput) -> bool:
        if sequence.rendezvous is not None:
            self._outgoing.hand_off(sequence, output)
            return False
        output.handoff = self._lease(sequence)
        return True

    def release(self, sequence: Sequence) -> list[int]:
        if sequence.handle is not None and not sequence.blocks and not sequence.num_output:
            self.decline(sequence.handle)  # it was waiting: no read has begun
        return (self._incoming if sequence.is_generation_only else self._outgoing).release(sequence)

    def decline(self, handle: KvHandle) -> None:
        self.receiver.release(handle)

    def abort(self, request_id: int) -> Sequence | None:
        waiting = self._outgoing.abort(request_id)
        if waiting is None:
            self.sender.leases.release_request(request_id)
        return waiting

    def poll(self) -> Iterator[KvEvent]:
        yield from self._reads.poll()
        yield from self._outgoing.poll()
        yield from self._incoming.poll()
        for late in self.peers.late.take_news():
            if late.ended:
                self._outgoing.landed(late)
                yield from self._blocks.free(late)
            else:
                yield from self._blocks.quarantine(late, late.endpoint)
        for lease in self.sender.leases.take_ended():
            yield BlocksReleased(lease.blocks)

    def seconds_to_deadline(self) -> float | None:
        lease = self.sender.leases.next_deadline()
        ends = [*self._outgoing.deadlines, *self._incoming.deadlines, *([] if lease is None else [lease])]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def close(self) -> None:
        self.push_receiver.close()
        self.peers.close()
        self.sender.close()
        self._transport.close()

    def _message_handlers(self) -> MessageHandlers:
        return {
            Offer: self.offers.offered,
            Withdraw: self.offers.withdrawn,
            Watch: self.offers.watched,
            Notice: self.push_receiver.noticed,
            Failure: self.push_receiver.failed,
            StillOffered: self.push_receiver.still_offered,
        }

    def _lease(self, sequence: Sequence) -> MadeHandoff:
        """Move the prompt's blocks to a lease."""
        blocks, sequence.blocks = sequence.blocks, []
        opaque_state = self.sender.lease(
            sequence.request_id,
            blocks,
            prompt_digest=prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt),
            num_tokens=sequence.num_prompt,
            seed=sequence.seed,
            cached_tokens=sequence.num_cached,
        )
        return MadeHandoff(
            opaque_state=opaque_state,
            first_gen_tokens=sequence.output,
            ctx_request_id=sequence.request_id,
            ctx_info_endpoint=self.endpoint,
        )

    def _fitting_handle(self, request: AddRequest) -> KvHandle:
        """Raise HandoffRefusedError unless the handoff belongs to this prompt and fits this engine."""
        if request.handoff is None:
            raise HandoffRefusedError("a generation_only request needs opaque_state and first_gen_tokens")
        handle = decode_handle(request.handoff.opaque_state)
        if handle.prompt != prompt_digest(request.prompt, request.cache_salt):
            raise HandoffRefusedError("the handoff belongs to another prompt")
        expected = -(-len(request.prompt) // self._layout.tokens_per_block)
        if handle.layout == self._layout.fingerprint() and (
            handle.num_tokens != len(request.prompt) or len(handle.blocks) != expected
        ):
            raise HandoffRefusedError(
                f"the handoff holds {len(handle.blocks)} blocks for {handle.num_tokens} tokens; "
                f"this prompt of {len(request.prompt)} tokens has {expected}"
            )
        return handle


def timeouts_of(config: CacheTransceiverConfig) -> KvTimeouts:
    milliseconds = config.kv_transfer_timeout_ms
    return KvTimeouts() if milliseconds is None else KvTimeouts(transfer=milliseconds / 1000)
