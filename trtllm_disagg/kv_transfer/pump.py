"""Peers connect, read and write through our agent, which runs no thread of its own: this one gives it time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from trtllm_disagg.kv_transfer.base import KvTransport

_BUSY_SECONDS = 0.001
_IDLE_SECONDS = 0.02


class Pump:
    """Fast while somebody is expected.

    Slowly otherwise, too: who reads learns only afterwards that its lease had ended, and a read that never ends
    costs the receiver the blocks that it reads into.
    """

    def __init__(self, transport: KvTransport, is_busy: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_busy = is_busy
        self._hurry = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-progress", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """Somebody may come now."""
        self._hurry.set()

    def close(self) -> None:
        self._closed = True
        self._hurry.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed:
            self._hurry.wait(_IDLE_SECONDS)
            self._hurry.clear()
            self._progress_while_busy()

    def _progress_while_busy(self) -> None:
        while not self._closed:
            self._transport.progress()
            if not self._is_busy():
                return
            time.sleep(_BUSY_SECONDS)
