"""The prefill side of GENERATION_FIRST: wait for decode's blocks, fill them while the prompt is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trtllm_disagg.embedded.connector.core_hooks import CoreHooks
from trtllm_disagg.embedded.ipc.messages import AddRequest, MadeHandoff, TokenOutput
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError, KvTransferError
from trtllm_disagg.kv_transfer.base import prompt_digest
from trtllm_disagg.kv_transfer.handle import Notice
from trtllm_disagg.kv_transfer.push import KvPusher, Move, OfferBook, Push


@dataclass(slots=True)
class _Pushing:
    push: Push
    #: Prompt blocks that decode has, or that are on their way.
    num_sent: int


class Pushing:
    def __init__(self, book: OfferBook, pusher: KvPusher, seconds: float, hooks: CoreHooks) -> None:
        self._book = book
        self._pusher = pusher
        self._seconds = seconds
        self._hooks = hooks
        self._size = hooks.blocks.tokens_per_block
        #: Without blocks and without a place in the batch: by disagg_request_id, and when each gives up.
        self._awaited: dict[int, tuple[Sequence, float]] = {}
        self._pushing: dict[Sequence, _Pushing] = {}
        #: All computed: the blocks, and what the client hears when decode has taken notice.
        self._delivering: dict[Push, tuple[list[int], TokenOutput]] = {}
        #: Of prefills that ended early: blocks that a move still uses.
        self._used: list[tuple[Push, list[int]]] = []

    @property
    def num_active(self) -> int:
        return len(self._awaited) + len(self._delivering) + len(self._used)

    @property
    def deadlines(self) -> list[float]:
        return [end for _, end in self._awaited.values()]

    def check(self, request: AddRequest) -> None:
        """Raise InvalidRequestError when the same request waits here already."""
        if request.rendezvous is not None and request.rendezvous.request in self._awaited:
            raise InvalidRequestError(f"disagg_request_id {request.rendezvous.request} is in use")

    def enter(self, sequence: Sequence) -> None:
        assert sequence.rendezvous is not None
        request = sequence.rendezvous.request
        self._awaited[request] = sequence, time.monotonic() + self._seconds
        self._look_for(request, sequence)

    def start(self, sequence: Sequence) -> None:
        """Decode has more of the prompt than this engine: read it instead of computing it."""
        first = len(sequence.keys)
        local = sequence.blocks[first : sequence.num_fetchable]
        self._pusher.read(self._pushing[sequence].push, first, local)

    def computed(self, sequence: Sequence) -> None:
        """Send what is finished, while the rest is computed."""
        if pushing := self._pushing.get(sequence):
            num_blocks = len(pushing.push.offer.blocks)
            is_whole = sequence.num_computed >= sequence.num_prompt
            end = num_blocks if is_whole else sequence.num_computed // self._size
            if end > pushing.num_sent:
                local = sequence.blocks[pushing.num_sent : end]
                self._pusher.write(pushing.push, pushing.num_sent, local)
                pushing.num_sent = end

    def deliver(self, sequence: Sequence, output: TokenOutput) -> bool:
        """The first token is there. False for a sequence that nobody has met."""
        pushing = self._pushing.pop(sequence, None)
        if pushing is None:
            return False
        self._hooks.scheduler.finish(sequence)
        output.handoff = MadeHandoff(b"", sequence.output, sequence.request_id, "")
        self._delivering[pushing.push] = sequence.blocks, output
        sequence.blocks = []
        notice = Notice(
            ticket=pushing.push.offer.ticket,
            token=sequence.output[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            seed=sequence.seed,
            cached_tokens=sequence.num_cached,
            bytes_moved=0,
        )
        self._pusher.deliver(pushing.push, notice)
        return True

    def withhold(self, sequence: Sequence) -> list[int]:
        """It has ended early: the blocks that no move uses any more."""
        pushing = self._pushing.pop(sequence, None)
        if pushing is None:
            return sequence.blocks
        self._pusher.fail(pushing.push, "the request has ended there")
        if pushing.push.stopped.is_set():
            return sequence.blocks
        self._used.append((pushing.push, sequence.blocks))
        return []

    def abort(self, request_id: int) -> bool:
        """End a request that waits for its decode."""
        for request, (sequence, _) in self._awaited.items():
            if sequence.request_id == request_id:
                del self._awaited[request]
                self._book.leave(request)
                self._hooks.cancelled(sequence)
                return True
        return False

    def step(self) -> None:
        if self._book.take_news():
            for request, (sequence, _) in list(self._awaited.items()):
                self._look_for(request, sequence)
            for sequence in [s for s, pushing in self._pushing.items() if pushing.push.is_withdrawn]:
                self._hooks.fail(sequence.request_id, KvTransferError(_GIVEN_UP))
        self._expire()
        for move in self._pusher.take_finished():
            self._moved(move)
        for push, blocks in self._used[:]:
            # A write that may still land lands in blocks that decode keeps apart, whatever it brings.
            if push.stopped.is_set() or push.may_land_later:
                self._used.remove((push, blocks))
                self._hooks.blocks.release(blocks)

    # -- internals

    def _look_for(self, request: int, sequence: Sequence) -> None:
        if push := self._book.take(request):
            del self._awaited[request]
            self._meet(sequence, push)
        elif self._book.was_left(request):
            self._leave(request, _GIVEN_UP)

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [request for request, (_, end) in self._awaited.items() if end <= now]:
            self._leave(request, f"no decode worker offered its blocks within {self._seconds:g} s")

    def _leave(self, request: int, reason: str) -> None:
        sequence, _ = self._awaited.pop(request)
        self._book.leave(request)
        self._hooks.fail(sequence.request_id, KvTransferError(reason))

    def _meet(self, sequence: Sequence, push: Push) -> None:
        offer = push.offer
        self._pushing[sequence] = _Pushing(push, offer.num_known)
        digest = prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt)
        if offer.prompt != digest or len(offer.blocks) != -(-sequence.num_prompt // self._size):
            self.withhold(sequence)
            self._hooks.fail(sequence.request_id, HandoffRefusedError("decode's offer is for another prompt"))
            return
        # The last prompt token is computed in any case: its logits make the first token.
        sequence.num_fetchable = min(offer.num_known, (sequence.num_prompt - 1) // self._size)
        self._hooks.enqueue(sequence)

    def _moved(self, move: Move) -> None:
        match move.what:
            case "read":
                for sequence in self._sequences_of(move.push):
                    sequence.num_computed = sequence.num_fetchable * self._size
                    sequence.num_cached = sequence.num_computed
                    self._hooks.commit(sequence)
                    self._hooks.scheduler.received(sequence)
            case "delivered":
                self._book.forget(move.push)
                blocks, output = self._delivering.pop(move.push)
                self._hooks.count_push(move.push.bytes_moved)
                self._hooks.blocks.release(blocks)
                self._hooks.emit(output)
            case "told":
                self._book.forget(move.push)
            case "broken":
                self._broken(move)

    def _broken(self, move: Move) -> None:
        error = move.error or KvTransferError("the push failed")
        for sequence in self._sequences_of(move.push):
            if move.lost:
                self._hooks.quarantine(list(move.lost), move.push.offer.decode)
                sequence.blocks = [block for block in sequence.blocks if block not in move.lost]
            self._hooks.fail(sequence.request_id, error)
        if delivery := self._delivering.pop(move.push, None):
            blocks, output = delivery
            self._pusher.fail(move.push, str(error))
            self._used.append((move.push, blocks))
            self._hooks.fail(output.request_id, error)

    def _sequences_of(self, push: Push) -> list[Sequence]:
        return [sequence for sequence, pushing in self._pushing.items() if pushing.push is push]


_GIVEN_UP = "the decode worker has given up on this request"
