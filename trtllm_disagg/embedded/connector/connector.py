"""How the two halves of a request meet: decode reads a finished prefill's blocks (CONTEXT_FIRST), or offers its own
for prefill to write into (GENERATION_FIRST, docs/decisions/0006).

In the latter nobody waits for the other side while holding what the other side may need: prefill waits for decode's
offer without blocks and without a place in the batch; decode, which holds both, waits for prefill's work alone.
"""

from __future__ import annotations

import time
from typing import Protocol

from trtllm_disagg.embedded.connector.core_hooks import CoreHooks
from trtllm_disagg.embedded.connector.pull import Pulling
from trtllm_disagg.embedded.connector.push import Pushing
from trtllm_disagg.embedded.connector.push_receiver import Expecting
from trtllm_disagg.embedded.ipc.messages import AddRequest, TokenOutput
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.errors import InvalidRequestError


class Meetings(Protocol):
    """Every sequence passes here on its way in and out; most of them are none of ours."""

    @property
    def num_active(self) -> int: ...

    def check(self, request: AddRequest) -> None:
        """Raise InvalidRequestError for a request that cannot be met."""
        ...

    def enter(self, sequence: Sequence) -> None:
        """To the scheduler; a prefill whose decode has not offered its blocks yet waits here."""
        ...

    def start(self, sequence: Sequence) -> None:
        """It has its blocks, and wants KV from the other engine."""
        ...

    def computed(self, sequence: Sequence) -> None:
        """More of its prompt's KV is there."""
        ...

    def deliver(self, sequence: Sequence, output: TokenOutput) -> bool:
        """A prefill has its first token. False for a sequence that was not met."""
        ...

    def withhold(self, sequence: Sequence) -> list[int]:
        """It has ended: the blocks that are free now. The others follow when nobody reads or writes them any more."""
        ...

    def abort(self, request_id: int) -> bool:
        """End a request that waits here."""
        ...

    def step(self) -> None:
        """Hear what has happened since."""
        ...

    def seconds_to_deadline(self) -> float | None: ...


class TwoSidedMeetings:
    """An engine may prefill for one and decode for another."""

    def __init__(self, pulling: Pulling, pushing: Pushing, expecting: Expecting, hooks: CoreHooks) -> None:
        self._pulling = pulling
        self._pushing = pushing
        self._expecting = expecting
        self._hooks = hooks

    @property
    def num_active(self) -> int:
        return self._pushing.num_active + self._expecting.num_active

    def check(self, request: AddRequest) -> None:
        if request.request_type == "context_only":
            self._pushing.check(request)

    def enter(self, sequence: Sequence) -> None:
        if sequence.rendezvous is None or sequence.is_generation_only:
            self._hooks.enqueue(sequence)
        else:
            self._pushing.enter(sequence)

    def start(self, sequence: Sequence) -> None:
        if sequence.rendezvous is None:
            self._pulling.start(sequence)
        elif sequence.is_generation_only:
            self._expecting.start(sequence)
        else:
            self._pushing.start(sequence)

    def computed(self, sequence: Sequence) -> None:
        self._pushing.computed(sequence)

    def deliver(self, sequence: Sequence, output: TokenOutput) -> bool:
        return self._pushing.deliver(sequence, output)

    def withhold(self, sequence: Sequence) -> list[int]:
        return (self._expecting if sequence.is_generation_only else self._pushing).withhold(sequence)

    def abort(self, request_id: int) -> bool:
        return self._pushing.abort(request_id)

    def step(self) -> None:
        self._pulling.step()
        self._pushing.step()
        self._expecting.step()

    def seconds_to_deadline(self) -> float | None:
        deadlines = self._pushing.deadlines + self._expecting.deadlines
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


class PullsOnly(TwoSidedMeetings):
    """An engine of several ranks: what prefill writes would have to be divided among them."""

    def check(self, request: AddRequest) -> None:
        if request.rendezvous is not None:
            raise InvalidRequestError("schedule_style GENERATION_FIRST needs tensor_parallel_size 1")


class NoMeetings:
    """An engine without a transport meets nobody."""

    num_active = 0

    def __init__(self, hooks: CoreHooks) -> None:
        self._hooks = hooks

    def check(self, request: AddRequest) -> None:
        if request.rendezvous is not None:
            raise InvalidRequestError("this engine has no cache_transceiver_config, so it meets no other")

    def enter(self, sequence: Sequence) -> None:
        self._hooks.enqueue(sequence)

    def start(self, sequence: Sequence) -> None:
        raise AssertionError("no meeting was agreed on")

    def computed(self, sequence: Sequence) -> None:
        """Nobody waits for it."""

    def deliver(self, sequence: Sequence, output: TokenOutput) -> bool:
        return False

    def withhold(self, sequence: Sequence) -> list[int]:
        return sequence.blocks

    def abort(self, request_id: int) -> bool:
        return False

    def step(self) -> None:
        """Nothing has happened."""

    def seconds_to_deadline(self) -> float | None:
        return None
