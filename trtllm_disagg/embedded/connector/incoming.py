"""The decode side: a finished prefill's blocks are read, or blocks are offered and prefill's notice awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator

from trtllm_disagg.embedded.connector.connector import (
    BlocksInTransfer,
    KvArrived,
    KvEvent,
    KvFailed,
    ReadEnded,
)
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import prompt_digest
from trtllm_disagg.kv_transfer.peers import LateTransfers
from trtllm_disagg.kv_transfer.pull import KvReceiver, Pull
from trtllm_disagg.kv_transfer.push_receiver import Expected, PushReceiver


class IncomingReads:
    """CONTEXT_FIRST."""

    def __init__(self, receiver: KvReceiver, late: LateTransfers, blocks: BlocksInTransfer) -> None:
        self._receiver = receiver
        self._late = late
        self._blocks = blocks
        self._reading: dict[Pull, Sequence] = {}

    def start(self, sequence: Sequence) -> None:
        """Fetch the prompt's blocks, except the first ones, which are in this engine's prefix cache."""
        handle, num_known = sequence.handle, len(sequence.keys)
        assert handle is not None
        local = sequence.blocks[num_known : len(handle.blocks)]
        sequence.timer.transfer_began()
        pull = Pull(handle=handle, remote=handle.blocks[num_known:], local=local)
        self._reading[pull] = sequence
        self._receiver.start(pull)

    def poll(self) -> Iterator[KvEvent]:
        for pull in self._receiver.take_finished():
            sequence = self._reading.pop(pull)
            error, late = pull.outcome
            if late is not None:
                yield from self._blocks.quarantine(late, pull.handle.sender, pull.local)
                sequence.blocks = [block for block in sequence.blocks if block not in set(pull.local)]
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
        sequence.timer.transfer_ended(pull.bytes_moved)
        return KvArrived(
            sequence,
            handoff.first_gen_tokens[0],
            (handoff.first_logprobs or [[]])[0],
            num_cached=pull.handle.cached_tokens,
            bytes_moved=pull.bytes_moved,
            num_known=len(pull.handle.blocks) - len(pull.local),
        )


class IncomingWrites:
    """GENERATION_FIRST."""

    def __init__(
        self, receiver: PushReceiver, blocks: BlocksInTransfer, tokens_per_block: int, seconds: float
    ) -> None:
        """`seconds`: how long prefill's notice is awaited."""
        self._receiver = receiver
        self._blocks = blocks
        self._size = tokens_per_block
        self._seconds = seconds
        #: What was offered, and when decode gives up.
        self._expected: dict[Sequence, tuple[Expected, float]] = {}

    @property
    def deadlines(self) -> list[float]:
        return [end for _, end in self._expected.values()]

    def start(self, sequence: Sequence) -> None:
        """It has its blocks: offer those of the prompt."""
        assert sequence.rendezvous is not None
        expected = Expected(
            endpoint=sequence.rendezvous.endpoint,
            request=sequence.rendezvous.request,
            prompt=prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt),
            blocks=sequence.blocks[: -(-sequence.num_prompt // self._size)],
            num_known=len(sequence.keys),
            seconds=self._seconds,
        )
        sequence.timer.transfer_began()
        self._expected[sequence] = expected, time.monotonic() + self._seconds
        self._receiver.expect(expected)

    def release(self, sequence: Sequence) -> list[int]:
        """The blocks that prefill cannot write into."""
        expected, _ = self._expected.pop(sequence, (None, 0.0))
        if expected is None:
            if sequence.rendezvous is not None and not sequence.num_output:
                self._receiver.decline(sequence.rendezvous.endpoint, sequence.rendezvous.request)
            return sequence.blocks
        late = self._receiver.give_up(expected)
        if late is None:
            return sequence.blocks
        offered = expected.blocks[expected.num_known :]
        self._blocks.hold(late, offered)
        return [block for block in sequence.blocks if block not in set(offered)]

    def poll(self) -> Iterator[KvEvent]:
        now = time.monotonic()
        for sequence, (expected, end) in list(self._expected.items()):
            if sequence not in self._expected:  # released by what an earlier event has ended
                continue
            if expected.notice is not None:
                del self._expected[sequence]
                yield self._arrived(sequence, expected)
            elif expected.error is not None:
                yield KvFailed(sequence.request_id, expected.error)
            elif end <= now:
                reason = f"prefill gave no notice within {self._seconds:g} s"
                yield KvFailed(sequence.request_id, KvTransferError(reason))

    def _arrived(self, sequence: Sequence, expected: Expected) -> KvArrived:
        notice = expected.notice
        assert notice is not None
        sequence.timer.transfer_ended(notice.bytes_moved)
        if sequence.sampling.seed is None:
            sequence.seed = notice.seed
        return KvArrived(
            sequence,
            notice.token,
            notice.logprobs,
            num_cached=notice.cached_tokens,
            bytes_moved=notice.bytes_moved,
            num_known=expected.num_known,
        )
