"""Small KV pools of a transport, in this process or a child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import pytest
import torch

from trtllm_disagg.engines.embedded.kv_transfer import nixl
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    BlockPairs,
    KvLayout,
    PeerMetadata,
    StagingTransport,
)
from trtllm_disagg.engines.embedded.kv_transfer.nixl import NixlTransport
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport

LAYERS, SLOTS, HEADS, DIM = 3, 4, 2, 8
LAYOUT = KvLayout("m", LAYERS, SLOTS, HEADS, DIM, "float32")


class Pool:
    """`kv[block, layer, k|v, ...]`, filled with numbers that encode their place."""

    def __init__(
        self, backend: str, num_blocks: int, name: str, transport: StagingTransport | None = None
    ) -> None:
        """`transport`: in place of the backend's."""
        self.transport = transport or create_transport(backend)
        shape = (num_blocks, LAYERS, 2, SLOTS, HEADS, DIM)
        self.kv = self.transport.allocate(shape, torch.float32, torch.device("cpu"))
        self.card = PeerMetadata(name, self.transport.name, LAYOUT, num_blocks, self.transport.serve(name))
        self._closed = threading.Event()
        self._pump = threading.Thread(target=self._progress, daemon=True)
        self._pump.start()

    def fill(self, start: float) -> None:
        self.kv.copy_(torch.arange(self.kv.numel()).view(self.kv.shape) + start)

    def read(
        self, peer: PeerMetadata, remote: Sequence[int], local: Sequence[int], timeout: float = 10.0
    ) -> int:
        return self.transport.read(peer, BlockPairs.of(remote, local), timeout)

    def write(
        self, peer: PeerMetadata, remote: Sequence[int], local: Sequence[int], timeout: float = 10.0
    ) -> int:
        return self.transport.write(peer, BlockPairs.of(remote, local), timeout)

    def close(self) -> None:
        self._closed.set()
        self._pump.join()
        self.transport.close()

    def _progress(self) -> None:
        """Serves connecting readers, like a sender with leases."""
        while not self._closed.wait(0.001):
            self.transport.progress()


@contextmanager
def pool_in_a_child(backend: str, transport: Literal["as it is", "tcp"] = "as it is") -> Any:
    """(its card, its process): a filled pool that is served until the process ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.pools", backend, transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        size = int(process.stdout.readline())
        yield msgspec.msgpack.decode(process.stdout.read(size), type=PeerMetadata), process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class TcpTransport(NixlTransport):
    """NIXL over tcp: a stopped peer stalls a read, and any program may read."""

    def serve(self, sender: str) -> bytes:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(nixl, "ucx_settings", lambda device, environ: {"UCX_TLS": "tcp"})
            patched.setattr(nixl, "UCX_ERROR_MODE", "peer")
            return super().serve(sender)


def _serve(backend: str, transport: str) -> None:
    pool = Pool(backend, 8, f"child-{os.getpid()}", TcpTransport() if transport == "tcp" else None)
    pool.fill(0.0)
    card = msgspec.msgpack.encode(pool.card)
    sys.stdout.buffer.write(b"%d\n" % len(card) + card)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    pool.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
