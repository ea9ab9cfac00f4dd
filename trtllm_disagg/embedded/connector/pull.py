"""The decode side of CONTEXT_FIRST: read a finished prefill's blocks."""

from __future__ import annotations

from trtllm_disagg.embedded.connector.core_hooks import CoreHooks
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.kv_transfer.pull import KvReceiver, Pull


class Pulling:
    def __init__(self, receiver: KvReceiver, hooks: CoreHooks) -> None:
        self._receiver = receiver
        self._hooks = hooks
        self._receiving: dict[int, Sequence] = {}

    def start(self, sequence: Sequence) -> None:
        """Fetch the prompt's blocks, except the first ones, which are in this engine's prefix cache."""
        handle, num_known = sequence.handle, len(sequence.keys)
        assert handle is not None
        self._receiving[id(sequence)] = sequence
        local = sequence.blocks[num_known : len(handle.blocks)]
        sequence.timer.transfer_began()
        pull = Pull(request_id=id(sequence), handle=handle, remote=handle.blocks[num_known:], local=local)
        self._receiver.start(pull)

    def step(self) -> None:
        for pull in self._receiver.take_finished():
            self._finish(self._receiving.pop(pull.request_id), pull)
        for pull in self._receiver.late.take_ended():
            self._hooks.blocks.restore(pull.local)

    def _finish(self, sequence: Sequence, pull: Pull) -> None:
        if pull.may_land_later:
            self._hooks.quarantine(pull.local, pull.handle.sender)
            self._receiver.late.add(pull)
            sequence.blocks = [block for block in sequence.blocks if block not in set(pull.local)]
        if sequence.aborted:
            self._hooks.retire(sequence)
        elif pull.error is not None:
            self._hooks.fail(sequence.request_id, pull.error)
            self._hooks.retire(sequence)
        else:
            self._received(sequence, pull)

    def _received(self, sequence: Sequence, pull: Pull) -> None:
        handoff = sequence.handoff
        assert handoff is not None
        sequence.timer.transfer_ended(pull.bytes_moved)
        self._hooks.count_arrival(pull.bytes_moved, len(pull.handle.blocks) - len(pull.local))
        sequence.num_computed = sequence.num_prompt
        sequence.num_cached = pull.handle.cached_tokens
        self._hooks.commit(sequence)
        self._hooks.scheduler.received(sequence)
        wanted = sequence.sampling.logprobs is not None
        logprobs = (handoff.first_logprobs or [[]])[0] if wanted else None
        self._hooks.accept(sequence, handoff.first_gen_tokens[0], logprobs)
