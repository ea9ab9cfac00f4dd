"""The decode side of GENERATION_FIRST: offer blocks, and wait for prefill's notice that they are filled."""

from __future__ import annotations

import time

from trtllm_disagg.embedded.connector.core_hooks import CoreHooks
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.kv_transfer.base import prompt_digest
from trtllm_disagg.kv_transfer.handle import Notice
from trtllm_disagg.kv_transfer.push_receiver import Expected, KvExpecter


class Expecting:
    def __init__(self, expecter: KvExpecter, seconds: float, hooks: CoreHooks) -> None:
        self._expecter = expecter
        self._seconds = seconds
        self._hooks = hooks
        #: What was offered, and when decode gives up.
        self._expected: dict[Sequence, tuple[Expected, float]] = {}
        #: Given up: blocks that prefill may still write into, and those that it does not let go of.
        self._limbo: dict[Expected, list[int]] = {}
        self._quarantined: dict[Expected, list[int]] = {}

    @property
    def num_active(self) -> int:
        """Requests that are expected are counted by the scheduler."""
        return len(self._limbo)

    @property
    def deadlines(self) -> list[float]:
        return [end for _, end in self._expected.values()]

    def start(self, sequence: Sequence) -> None:
        """It has its blocks: offer those of the prompt."""
        assert sequence.rendezvous is not None
        num_blocks = -(-sequence.num_prompt // self._hooks.blocks.tokens_per_block)
        expected = Expected(
            endpoint=sequence.rendezvous.endpoint,
            request=sequence.rendezvous.request,
            prompt=prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt),
            blocks=sequence.blocks[:num_blocks],
            num_known=len(sequence.keys),
            seconds=self._seconds,
        )
        sequence.timer.transfer_began()
        self._expected[sequence] = expected, time.monotonic() + self._seconds
        self._expecter.expect(expected)

    def withhold(self, sequence: Sequence) -> list[int]:
        """It has ended: the blocks that prefill cannot write into."""
        expected, _ = self._expected.pop(sequence, (None, 0.0))
        if expected is None:
            self._decline_if_early(sequence)
            return sequence.blocks
        if self._expecter.give_up(expected):
            return sequence.blocks
        offered = expected.blocks[expected.num_known :]
        self._limbo[expected] = offered
        return [block for block in sequence.blocks if block not in set(offered)]

    def step(self) -> None:
        now = time.monotonic()
        for sequence, (expected, end) in list(self._expected.items()):
            if expected.notice is not None:
                del self._expected[sequence]
                self._received(sequence, expected, expected.notice)
            elif expected.error is not None:
                self._hooks.fail(sequence.request_id, expected.error)
            elif end <= now:
                reason = f"prefill gave no notice within {self._seconds:g} s"
                self._hooks.fail(sequence.request_id, KvTransferError(reason))
        for expected in self._expecter.take_stuck():
            if offered := self._limbo.pop(expected, None):
                self._quarantined[expected] = offered
                self._hooks.quarantine(offered, expected.prefill)
        for expected in self._expecter.take_freed():
            self._hooks.blocks.release(self._limbo.pop(expected, []))
            self._hooks.blocks.restore(self._quarantined.pop(expected, []))

    def _decline_if_early(self, sequence: Sequence) -> None:
        if sequence.rendezvous is not None and not sequence.num_output:
            self._expecter.decline(sequence.rendezvous.endpoint, sequence.rendezvous.request)

    def _received(self, sequence: Sequence, expected: Expected, notice: Notice) -> None:
        sequence.timer.transfer_ended(notice.bytes_moved)
        self._hooks.count_arrival(notice.bytes_moved, expected.num_known)
        if sequence.sampling.seed is None:
            sequence.seed = notice.seed
        sequence.num_computed = sequence.num_prompt
        sequence.num_cached = notice.cached_tokens
        self._hooks.commit(sequence)
        self._hooks.scheduler.received(sequence)
        wanted = sequence.sampling.logprobs is not None
        self._hooks.accept(sequence, notice.token, notice.logprobs if wanted else None)
