"""GENERATION_FIRST, the prefill side: prompts are written into decode's blocks while they are computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_disagg.embedded.connector.connector import (
    BlocksInTransfer,
    HandedOff,
    KvEvent,
    KvFailed,
    Offered,
    PrefixArrived,
)
from trtllm_disagg.embedded.ipc.messages import MadeHandoff, TokenOutput
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import HandoffRefusedError, KvTransferError
from trtllm_disagg.kv_transfer.base import prompt_digest
from trtllm_disagg.kv_transfer.messages import Notice
from trtllm_disagg.kv_transfer.peers import LateTransfers
from trtllm_disagg.kv_transfer.push import GIVEN_UP, KvPusher, Move, OfferBook, Push


@dataclass(slots=True)
class _Pushed:
    push: Push
    #: Prompt blocks that decode has, or that are on their way.
    num_sent: int


class OutgoingWrites:
    def __init__(
        self,
        offers: OfferBook,
        pusher: KvPusher,
        late: LateTransfers,
        blocks: BlocksInTransfer,
        tokens_per_block: int,
        seconds: float,
    ) -> None:
        """`seconds`: how long decode's offer is awaited."""
        self._offers = offers
        self._pusher = pusher
        self._late = late
        self._blocks = blocks
        self._size = tokens_per_block
        self._seconds = seconds
        #: Without blocks and without a place in the batch: by disagg_request_id, and when each gives up.
        self._awaited: dict[int, tuple[Sequence, float]] = {}
        self._pushed: dict[Sequence, _Pushed] = {}
        #: All is computed: what the client hears when decode has taken notice.
        self._delivering: dict[Push, TokenOutput] = {}
        #: A prefill has come since the last look at the offers.
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
        """Decode has more of the prompt than this engine: read it instead of computing it."""
        first = len(sequence.keys)
        local = sequence.blocks[first : sequence.num_fetchable]
        self._pusher.read(self._pushed[sequence].push, first, local)

    def computed(self, sequence: Sequence) -> None:
        """Send what is finished, while the rest is computed."""
        if pushed := self._pushed.get(sequence):
            num_blocks = len(pushed.push.offer.blocks)
            is_whole = sequence.num_computed >= sequence.num_prompt
            end = num_blocks if is_whole else sequence.num_computed // self._size
            if end > pushed.num_sent:
                local = sequence.blocks[pushed.num_sent : end]
                self._pusher.write(pushed.push, pushed.num_sent, local)
                pushed.num_sent = end

    def hand_off(self, sequence: Sequence, output: TokenOutput) -> None:
        """The first token is there: give decode notice once all is written."""
        push = self._pushed.pop(sequence).push
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
        """The blocks that no move uses any more."""
        pushed = self._pushed.pop(sequence, None)
        if pushed is None:
            return sequence.blocks
        self._pusher.fail(pushed.push, "the request has ended there")
        if pushed.push.stopped.is_set():
            return sequence.blocks
        self._blocks.hold(pushed.push, sequence.blocks)
        return []

    def abort(self, request_id: int) -> Sequence | None:
        """End a request that waits for its decode."""
        for request, (sequence, _) in self._awaited.items():
            if sequence.request_id == request_id:
                del self._awaited[request]
                self._offers.leave(request)
                return sequence
        return None

    def poll(self) -> Iterator[KvEvent]:
        if self._offers.take_news() or self.has_news:
            self.has_news = False
            for request in list(self._awaited):
                yield from self._look_for_offer(request)
            for sequence in [s for s, pushed in self._pushed.items() if pushed.push.is_withdrawn]:
                yield KvFailed(sequence.request_id, KvTransferError(GIVEN_UP))
        now = time.monotonic()
        for request in [request for request, (_, end) in self._awaited.items() if end <= now]:
            yield self._leave(request, f"no decode worker offered its blocks within {self._seconds:g} s")
        for move in self._pusher.take_finished():
            yield from self._moved(move)

    def _look_for_offer(self, request: int) -> Iterator[KvEvent]:
        if push := self._offers.take(request):
            sequence, _ = self._awaited.pop(request)
            yield from self._take_offer(sequence, push)
        elif self._offers.was_left(request):
            yield self._leave(request, GIVEN_UP)

    def _leave(self, request: int, reason: str) -> KvFailed:
        sequence, _ = self._awaited.pop(request)
        self._offers.leave(request)
        return KvFailed(sequence.request_id, KvTransferError(reason))

    def _take_offer(self, sequence: Sequence, push: Push) -> Iterator[KvEvent]:
        offer = push.offer
        self._pushed[sequence] = _Pushed(push, offer.num_known)
        digest = prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt)
        if offer.prompt != digest or len(offer.blocks) != -(-sequence.num_prompt // self._size):
            self.release(sequence)
            yield KvFailed(sequence.request_id, HandoffRefusedError("decode's offer is for another prompt"))
            return
        # The last prompt token is computed in any case: its logits make the first token.
        sequence.num_fetchable = min(offer.num_known, (sequence.num_prompt - 1) // self._size)
        yield Offered(sequence)

    def _moved(self, move: Move) -> Iterator[KvEvent]:
        match move.what:
            case "read":
                yield from map(PrefixArrived, self._sequences_of(move.push))
            case "delivered":
                self._offers.forget(move.push)
                yield from self._blocks.free(move.push)
                yield HandedOff(self._delivering.pop(move.push), move.push.bytes_moved)
            case "stopped":
                # A write that may still land lands in blocks that decode keeps apart, whatever it brings.
                yield from self._blocks.free(move.push)
            case "told":
                self._offers.forget(move.push)
            case "broken":
                yield from self._broken(move)

    def _broken(self, move: Move) -> Iterator[KvEvent]:
        error, late = move.outcome
        assert error is not None
        for sequence in self._sequences_of(move.push):
            if late is not None and move.filled:
                yield from self._blocks.quarantine(late, move.push.offer.decode, list(move.filled))
                sequence.blocks = [block for block in sequence.blocks if block not in move.filled]
                self._late.add(late)
            yield KvFailed(sequence.request_id, error)
        if output := self._delivering.pop(move.push, None):
            self._pusher.fail(move.push, str(error))
            yield KvFailed(output.request_id, error)

    def _sequences_of(self, push: Push) -> list[Sequence]:
        return [sequence for sequence, pushed in self._pushed.items() if pushed.push is push]
