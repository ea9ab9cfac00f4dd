"""A KV transport with scripted transfers: late, failing, interrupted, held back.

It wraps a real transport, which moves the bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    PeerMetadata,
    ReadTimeoutError,
    StagingTransport,
)
from trtllm_disagg.engines.embedded.kv_transfer.shared_memory import SharedMemoryTransport
from trtllm_disagg.errors import KvTransferError

Kind = Literal["read", "write", "forget"]


@dataclass(frozen=True, slots=True)
class Fails:
    """Raises this."""

    error: Exception


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """Sets `begun`, waits for `go`, then moves all."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    #: Limit for a hang, in seconds.
    seconds: float = 20.0

    def wait(self) -> None:
        self.begun.set()
        if not self.go.wait(self.seconds):
            raise KvTransferError("the script never continued it")


@dataclass(frozen=True, slots=True)
class TakesTooLong:
    """Waits for `after`, then raises ReadTimeoutError; may land later until `ended` is set."""

    ended: threading.Event = field(default_factory=threading.Event)
    after: WaitsFor | None = None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Moves a part of the blocks, calls, then moves the rest."""

    call: Callable[[], None]
    #: Between 0 and 1.
    after: float = 0.0


Outcome = Fails | TakesTooLong | WaitsFor | Interrupted


@dataclass(frozen=True, slots=True)
class Transfer:
    """A requested transfer."""

    kind: Kind
    peer: str
    remote: tuple[int, ...] = ()
    local: tuple[int, ...] = ()


@dataclass(slots=True)
class _Plan:
    once: deque[Outcome] = field(default_factory=deque)
    always: Outcome | None = None


class FakeTransport:
    """`then` scripts the next transfers, `always` all later ones; `transfers` lists the requested ones."""

    def __init__(self, inner: StagingTransport | None = None) -> None:
        self._inner = inner or SharedMemoryTransport()
        self.name = self._inner.name if inner else "FAKE"
        self.transfers: list[Transfer] = []
        self._plans: dict[Kind, _Plan] = {"read": _Plan(), "write": _Plan(), "forget": _Plan()}

    def then(self, kind: Kind, *outcomes: Outcome) -> None:
        self._plans[kind].once.extend(outcomes)

    def always(self, kind: Kind, outcome: Outcome | None) -> None:
        """Returns None like the real one."""
        self._plans[kind].always = outcome

    def forget_script(self) -> None:
        for kind in self._plans:
            self._plans[kind] = _Plan()

    def count(self, kind: Kind) -> int:
        return sum(transfer.kind == kind for transfer in self.transfers)

    # -- as a transport

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(shape, dtype, device)

    def serve(self, sender: str) -> bytes:
        return self._inner.serve(sender)

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        return self._move("read", peer, blocks, timeout)

    def write(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        return self._move("write", peer, blocks, timeout)

    def fetched(
        self, peer: PeerMetadata, blocks: np.ndarray, block_bytes: int, timeout: float
    ) -> AbstractContextManager[np.ndarray]:
        return self._inner.fetched(peer, blocks, block_bytes, timeout)

    def forget(self, peer: PeerMetadata) -> None:
        self.transfers.append(Transfer("forget", peer.sender))
        if isinstance(outcome := self._next("forget"), Fails):
            raise outcome.error
        self._inner.forget(peer)

    def progress(self) -> None:
        self._inner.progress()

    def close(self) -> None:
        self._inner.close()

    def _next(self, kind: Kind) -> Outcome | None:
        plan = self._plans[kind]
        return plan.once.popleft() if plan.once else plan.always

    def _move(self, kind: Kind, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        self.transfers.append(Transfer(kind, peer.sender, *(tuple(ids.tolist()) for ids in blocks)))
        move = self._inner.read if kind == "read" else self._inner.write
        match self._next(kind):
            case Fails(error):
                raise error
            case TakesTooLong(ended, after):
                if after is not None:
                    after.wait()
                raise ReadTimeoutError(
                    f"took longer than {timeout:.0f} s", may_land_later=True, has_ended=ended.is_set
                )
            case WaitsFor() as held:
                held.wait()
            case Interrupted(call, after):
                part = int(len(blocks.remote) * after)
                moved = move(peer, BlockPairs(*(ids[:part] for ids in blocks)), timeout) if part else 0
                call()
                rest = BlockPairs(*(ids[part:] for ids in blocks))
                return moved + (move(peer, rest, timeout) if len(rest.remote) else 0)
        return move(peer, blocks, timeout)
