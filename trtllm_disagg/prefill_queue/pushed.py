"""An item as its pusher sees it: who is at it, and what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from trtllm_disagg.errors import DisaggError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.handlers.remote import QUEUE_ID
from trtllm_disagg.prefill_queue.messages import Answer, Beat, Claim, FromPuller, Item, failure_of

#: An item that so many workers have lost is not given to another one.
MAX_CLAIMS = 3


class Arrived:
    """An answer that nobody has taken yet. Its sender keeps the duty to release the KV until somebody does."""

    def __init__(self, chunk: dict[str, Any], reply: Callable[[bool], None]) -> None:
        self._chunk = chunk
        self._reply = reply
        self._is_settled = False

    def take(self) -> dict[str, Any]:
        self._settle(True)
        return self._chunk

    def refuse(self) -> None:
        """Idempotent; nothing happens after `take`."""
        if not self._is_settled:
            self._settle(False)

    def _settle(self, taken: bool) -> None:
        self._is_settled = True
        self._reply(taken)


class Pushed:
    """`outcome` is what arrived, None when the client has left, or an error."""

    def __init__(self, item: Item, timeout: float, on_claim: Callable[[Claim], None]) -> None:
        """`timeout`: seconds for which nobody may be at it."""
        self.item = item
        self.outcome: asyncio.Future[Arrived | None] = asyncio.get_running_loop().create_future()
        #: Its place in the stream, once it is there.
        self.sequence: int | None = None
        #: Who is at it.
        self.claim: Claim | None = None
        self._num_claims = 0
        self._is_settled = False
        self._timeout = timeout
        self._on_claim = on_claim
        self._timer = self._wait()
        self._began = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since it was pushed."""
        return time.monotonic() - self._began

    @property
    def is_waiting(self) -> bool:
        """No worker has begun."""
        return self.claim is None and not self.outcome.done()

    @property
    def is_settled(self) -> bool:
        """A worker has answered, and needs to hear no more."""
        return self._is_settled

    def hear(self, said: FromPuller, reply: Callable[[bool], None]) -> None:
        """Only one attempt is listened to: the latest that was let in."""
        if self.outcome.done():
            reply(False)
        elif isinstance(said, Claim):
            reply(self._let_in(said))
        elif self.claim is None or said.attempt != self.claim.attempt:
            reply(False)
        elif isinstance(said, Beat):
            self._wait_anew()
        elif isinstance(said, Answer):
            self._is_settled = True
            self.outcome.set_result(Arrived(said.chunk, reply))
        else:
            self._is_settled = True
            self.fail(failure_of(said), self.claim.worker)

    def fail(self, error: DisaggError, peer: int = QUEUE_ID) -> None:
        """`peer`: who is to blame."""
        error.peer = peer
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def give_up(self) -> None:
        """The client has left."""
        if not self.outcome.done():
            self.outcome.set_result(None)

    def close(self) -> None:
        """Nobody will ask for the outcome any more."""
        self._timer.cancel()
        if not self.outcome.done():
            self.outcome.cancel()
        elif not self.outcome.cancelled() and self.outcome.exception() is None:
            arrived = self.outcome.result()
            if arrived is not None:
                arrived.refuse()

    def _let_in(self, claim: Claim) -> bool:
        if self.claim is not None and claim.attempt <= self.claim.attempt:
            return False
        if self._num_claims == MAX_CLAIMS:
            self.fail(PeerUnavailableError(f"{MAX_CLAIMS} prefill workers have lost this request"))
            return False
        self.claim = claim
        self._num_claims += 1
        self._on_claim(claim)
        self._wait_anew()
        return True

    def _wait_anew(self) -> None:
        self._timer.cancel()
        self._timer = self._wait()

    def _wait(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._timeout, self._time_out)

    def _time_out(self) -> None:
        what, peer = "no prefill worker has taken the request from the queue", QUEUE_ID
        if self.claim is not None:
            peer = self.claim.worker
            what = f"the prefill worker {peer:x} has fallen silent, and no other has taken over"
        self.fail(StageTimeoutError(f"{what} within {self._timeout:g} s (--queue-timeout)"), peer)
