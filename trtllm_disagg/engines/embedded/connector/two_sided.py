"""The KV connector of an engine with a transport. Its three parts: decode reads (CONTEXT_FIRST); decode's blocks are
written, and prefill writes them (GENERATION_FIRST). A lease serves the reads (`kv_transfer/pull.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from trtllm_disagg.engines.embedded.connector.connector import (
    BlocksInTransfer,
    BlocksReleased,
    HandedOff,
    KvArrived,
    KvConnector,
    KvEvent,
    KvFailed,
    Offered,
    PrefixArrived,
    ReadEnded,
)
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, MadeHandoff, TokenOutput
from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, KvTimeouts, KvTransport, prompt_digest
from trtllm_disagg.engines.embedded.kv_transfer.connections import (
    LateTransfer,
    LateTransfers,
    PeerConnections,
)
from trtllm_disagg.engines.embedded.kv_transfer.control import (
    MAX_OFFER_SECONDS,
    Failure,
    MessageHandlers,
    Notice,
    Offer,
    StillOffered,
    Watch,
    Withdraw,
    new_ticket,
)
from trtllm_disagg.engines.embedded.kv_transfer.pull import KvReceiver, KvSender, Pull
from trtllm_disagg.engines.embedded.kv_transfer.push import (
    GIVEN_UP,
    Expected,
    KvPusher,
    Move,
    OfferBook,
    Push,
    PushReceiver,
)
from trtllm_disagg.engines.embedded.params.llm_args import CacheTransceiverConfig
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError, KvTransferError
from trtllm_disagg.wire.kv_handle import KvHandle, decode_handle


class IncomingReads:
    """CONTEXT_FIRST, decode's end: reads a finished prefill's blocks."""

    def __init__(self, receiver: KvReceiver, late: LateTransfers, blocks: BlocksInTransfer) -> None:
        self._receiver = receiver
        self._late = late
        self._blocks = blocks
        self._reading: dict[Pull, Sequence] = {}

    def start(self, sequence: Sequence) -> None:
        """Fetch the prompt's blocks that are not in this engine's prefix cache."""
        handle, num_known = sequence.handle, len(sequence.keys)
        assert handle is not None
        local = sequence.blocks[num_known : len(handle.blocks)]
        if sequence.timer is not None:
            sequence.timer.transfer_began()
        pull = Pull(
            handle=handle,
            remote=handle.blocks[num_known:],
            local=local,
            is_wanted=lambda: not sequence.aborted,
        )
        self._reading[pull] = sequence
        self._receiver.start(pull)

    def poll(self) -> Iterator[KvEvent]:
        for pull in self._receiver.take_finished():
            sequence = self._reading.pop(pull)
            error, late = pull.outcome
            if late is not None:
                filled = set(pull.local)
                yield from self._blocks.quarantine(late, pull.handle.sender, pull.local)
                sequence.blocks = [block for block in sequence.blocks if block not in filled]
                self._late.add(late)
            if error is None and not sequence.aborted:
                yield self._arrived(sequence, pull)
                continue
            if error is not None and not sequence.aborted:
                yield KvFailed(sequence.request_id, error)
            yield ReadEnded(sequence)

    def _arrived(self, sequence: Sequence, pull: Pull) -> KvArrived:
        handoff = sequence.handoff
        assert handoff is not None
        if sequence.timer is not None:
            sequence.timer.transfer_ended(pull.bytes_moved)
        return KvArrived(
            sequence,
            handoff.first_gen_tokens[0],
            handoff.first_logprobs[0] if handoff.first_logprobs else None,
            num_cached=pull.handle.cached_tokens,
            bytes_moved=pull.bytes_moved,
            num_known=len(pull.handle.blocks) - len(pull.local),
        )


class IncomingWrites:
    """GENERATION_FIRST, decode's end: offers blocks, and waits for prefill's notice."""

    def __init__(
        self,
        receiver: PushReceiver,
        blocks: BlocksInTransfer,
        endpoint: str,
        layout: KvLayout,
        seconds: float,
    ) -> None:
        """`endpoint`: this engine's; `seconds`: how long to wait for prefill's notice."""
        self._receiver = receiver
        self._blocks = blocks
        self._endpoint = endpoint
        self._layout = layout
        self._seconds = seconds
        self._expected: dict[Sequence, Expected] = {}

    @property
    def deadlines(self) -> list[float]:
        return [expected.end for expected in self._expected.values()]

    def start(self, sequence: Sequence) -> None:
        """Offer the sequence's newly allocated blocks."""
        assert sequence.rendezvous is not None
        offer = Offer(
            request=sequence.rendezvous.request,
            ticket=new_ticket(),
            endpoint=self._endpoint,
            layout=self._layout.fingerprint(),
            prompt=prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt),
            blocks=sequence.blocks[: -(-sequence.num_prompt // self._layout.tokens_per_block)],
            num_known=len(sequence.keys),
            seconds=min(self._seconds, MAX_OFFER_SECONDS),
        )
        end = time.monotonic() + self._seconds
        expected = Expected(endpoint=sequence.rendezvous.endpoint, offer=offer, end=end)
        if sequence.timer is not None:
            sequence.timer.transfer_began()
        self._expected[sequence] = expected
        self._receiver.expect(expected)

    def release(self, sequence: Sequence) -> list[int]:
        """The blocks that prefill cannot write into."""
        expected = self._expected.pop(sequence, None)
        if expected is None:
            if sequence.rendezvous is not None and not sequence.num_output:
                self._receiver.decline(sequence.rendezvous.endpoint, sequence.rendezvous.request)
            return sequence.blocks
        late = self._receiver.give_up(expected)
        if late is None:
            return sequence.blocks
        offered = expected.offer.blocks[expected.offer.num_known :]
        self._blocks.hold(late, offered)
        kept = set(offered)
        return [block for block in sequence.blocks if block not in kept]

    def poll(self) -> Iterator[KvEvent]:
        now = time.monotonic()
        for sequence, expected in list(self._expected.items()):
            if sequence not in self._expected:  # released while an earlier event was applied
                continue
            if expected.notice is not None:
                del self._expected[sequence]
                yield self._arrived(sequence, expected)
            elif expected.error is not None:
                yield KvFailed(sequence.request_id, expected.error)
            elif expected.end <= now:
                reason = f"prefill gave no notice within {self._seconds:g} s"
                yield KvFailed(sequence.request_id, KvTransferError(reason))

    def _arrived(self, sequence: Sequence, expected: Expected) -> KvArrived:
        notice = expected.notice
        assert notice is not None
        if sequence.timer is not None:
            sequence.timer.transfer_ended(notice.bytes_moved)
        if sequence.sampling.seed is None:
            sequence.seed = notice.seed
        return KvArrived(
            sequence,
            notice.token,
            notice.logprobs,
            num_cached=notice.cached_tokens,
            bytes_moved=notice.bytes_moved,
            num_known=expected.offer.num_known,
        )


class OutgoingWrites:
    """GENERATION_FIRST, prefill's end: writes a prompt's KV into decode's blocks while it is computed."""

    def __init__(
        self,
        offers: OfferBook,
        pusher: KvPusher,
        late: LateTransfers,
        blocks: BlocksInTransfer,
        tokens_per_block: int,
        seconds: float,
    ) -> None:
        """`seconds`: how long to wait for decode's offer."""
        self._offers = offers
        self._pusher = pusher
        self._late = late
        self._blocks = blocks
        self._size = tokens_per_block
        self._seconds = seconds
        #: Prefills without an offer (and so without blocks), by disagg_request_id, with their deadline.
        self._awaited: dict[int, tuple[Sequence, float]] = {}
        self._pushed: dict[Sequence, Push] = {}
        #: Finished prefills: their output, sent once decode has accepted the notice.
        self._delivering: dict[Push, TokenOutput] = {}
        #: Late writes, which may still fill decode's blocks.
        self._landing: dict[LateTransfer, Push] = {}
        #: A prefill was added since the last check of the offers.
        self.has_news = False

    @property
    def num_awaited(self) -> int:
        return len(self._awaited)

    @property
    def deadlines(self) -> list[float]:
        return [end for _, end in self._awaited.values()]

    def is_awaited(self, request: int) -> bool:
        return request in self._awaited

    def await_offer(self, sequence: Sequence) -> None:
        assert sequence.rendezvous is not None
        self._awaited[sequence.rendezvous.request] = sequence, time.monotonic() + self._seconds
        self.has_news = True

    def start(self, sequence: Sequence) -> None:
        """Read the part of the prompt that only decode has cached, instead of computing it."""
        first = len(sequence.keys)
        local = sequence.blocks[first : sequence.num_fetchable]
        self._pusher.read(self._pushed[sequence], first, local)

    def computed(self, sequence: Sequence) -> None:
        """Write the finished blocks while the rest of the prompt is computed."""
        if push := self._pushed.get(sequence):
            is_complete = sequence.num_computed >= sequence.num_prompt
            end = len(push.offer.blocks) if is_complete else sequence.num_computed // self._size
            if end > push.num_sent:
                self._pusher.write(push, push.num_sent, sequence.blocks[push.num_sent : end])
                push.num_sent = end

    def hand_off(self, sequence: Sequence, output: TokenOutput) -> None:
        """Send decode the notice with the first token, once all blocks are written."""
        push = self._pushed.pop(sequence)
        output.handoff = MadeHandoff(b"", sequence.output, sequence.request_id, "")
        self._delivering[push] = output
        self._blocks.hold(push, sequence.blocks)
        sequence.blocks = []
        notice = Notice(
            ticket=push.offer.ticket,
            token=sequence.output[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            seed=sequence.seed,
            cached_tokens=sequence.num_cached,
            bytes_moved=0,
        )
        self._pusher.deliver(push, notice)

    def release(self, sequence: Sequence) -> list[int]:
        """The blocks that no move uses; a push frees its blocks after its last move."""
        push = self._pushed.pop(sequence, None)
        if push is None:
            return sequence.blocks
        self._pusher.fail(push, "the request has ended on the prefill worker")
        self._blocks.hold(push, sequence.blocks)
        return []

    def abort(self, request_id: int) -> Sequence | None:
        """End a request that waits for decode's offer; None when it does not."""
        for request, (sequence, _) in self._awaited.items():
            if sequence.request_id == request_id:
                del self._awaited[request]
                self._offers.abandon(request)
                return sequence
        return None

    def poll(self) -> Iterator[KvEvent]:
        if self._offers.take_news() or self.has_news:
            self.has_news = False
            for request in list(self._awaited):
                yield from self._look_for_offer(request)
            for sequence in [s for s, push in self._pushed.items() if push.is_withdrawn]:
                yield KvFailed(sequence.request_id, KvTransferError(GIVEN_UP))
        now = time.monotonic()
        for request in [request for request, (_, end) in self._awaited.items() if end <= now]:
            yield self._give_up(request, f"no decode worker offered its blocks within {self._seconds:g} s")
        for move in self._pusher.take_finished():
            yield from self._moved(move)

    def landed(self, late: LateTransfer) -> None:
        """A late transfer ended. If it was a write, decode's next withdrawal finds the push stopped."""
        if push := self._landing.pop(late, None):
            push.landed()
            self._offers.forget(push)

    def _look_for_offer(self, request: int) -> Iterator[KvEvent]:
        if push := self._offers.take(request):
            sequence, _ = self._awaited.pop(request)
            yield from self._take_offer(sequence, push)
        elif self._offers.was_abandoned_by_decode(request):
            yield self._give_up(request, GIVEN_UP)

    def _give_up(self, request: int, reason: str) -> KvFailed:
        sequence, _ = self._awaited.pop(request)
        self._offers.abandon(request)
        return KvFailed(sequence.request_id, KvTransferError(reason))

    def _take_offer(self, sequence: Sequence, push: Push) -> Iterator[KvEvent]:
        offer = push.offer
        self._pushed[sequence] = push
        digest = prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt)
        if offer.prompt != digest or len(offer.blocks) != -(-sequence.num_prompt // self._size):
            self.release(sequence)
            yield KvFailed(sequence.request_id, HandoffRefusedError("decode's offer is for another prompt"))
            return
        sequence.num_fetchable = min(offer.num_known, sequence.num_reusable // self._size)
        yield Offered(sequence)

    def _moved(self, move: Move) -> Iterator[KvEvent]:
        match move.kind:
            case "read":
                yield from map(PrefixArrived, self._sequences_of(move.push))
            case "delivered":
                self._offers.forget(move.push)
                yield from self._blocks.free(move.push)
                yield HandedOff(self._delivering.pop(move.push), move.push.bytes_moved)
            case "stopped":
                # Decode keeps the blocks of a late write in quarantine.
                yield from self._blocks.free(move.push)
            case "failure_sent":
                self._offers.forget(move.push)
            case "failed":
                yield from self._failed(move)

    def _failed(self, move: Move) -> Iterator[KvEvent]:
        error, late = move.outcome
        assert error is not None
        sequences = self._sequences_of(move.push)
        if late is not None:
            yield from self._late_move(move, late, sequences)
        for sequence in sequences:
            yield KvFailed(sequence.request_id, error)
        if output := self._delivering.pop(move.push, None):
            self._pusher.fail(move.push, str(error))
            yield KvFailed(output.request_id, error)

    def _late_move(self, move: Move, late: LateTransfer, sequences: list[Sequence]) -> Iterator[KvEvent]:
        if move.filled:
            # The request has these blocks; if it was aborted, the push does.
            self._blocks.take_from(move.push, move.filled)
            for sequence in sequences:
                sequence.blocks = [block for block in sequence.blocks if block not in move.filled]
            yield from self._blocks.quarantine(late, move.push.offer.endpoint, list(move.filled))
        else:
            self._landing[late] = move.push
        self._late.add(late)

    def _sequences_of(self, push: Push) -> list[Sequence]:
        return [sequence for sequence, each in self._pushed.items() if each is push]


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
        ranks: prefill cannot split its writes among them.
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
        self.peers = PeerConnections(transport, layout, timeouts=timeouts, on_change=wake)
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
        """Excludes requests that expect KV: the scheduler counts them."""
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
        assert request.handoff is not None
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
