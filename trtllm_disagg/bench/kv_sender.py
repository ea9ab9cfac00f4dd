"""The sending end of `bench transfer`, a process of its own: a filled pool and a KvSender that leases its blocks.

Standard input carries one block list a line, standard output answers with its handle; both end together.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from trtllm_disagg.bench.kv_shapes import KvShape, fill
from trtllm_disagg.errors import KvTransferError
from trtllm_disagg.interpreter import python
from trtllm_disagg.kv_transfer.access import OneHost
from trtllm_disagg.kv_transfer.handle import KvHandle, decode_handle
from trtllm_disagg.kv_transfer.pull import KvSender
from trtllm_disagg.kv_transfer.transports import create_transport

LEASE_SECONDS = 600.0
_PROMPT = bytes(16)


class Serving(msgspec.Struct):
    """The child's first line."""

    pid: int
    pool_address: int


class SenderProcess:
    """Starts the child; `lease` asks it for handles. Raises KvTransferError when it cannot start or has died."""

    def __init__(self, backend: str, shape: KvShape) -> None:
        self._process = subprocess.Popen(
            python("-m", __name__, backend),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            self._send(msgspec.json.encode(shape))
            self.serving = msgspec.json.decode(self._answer(), type=Serving)
        except BaseException:
            self.close()
            raise

    def lease(self, blocks: Sequence[int]) -> KvHandle:
        self._send(msgspec.json.encode(list(blocks)))
        return decode_handle(bytes.fromhex(self._answer().decode()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> SenderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise KvTransferError(f"the sending process ended with exit code {self._process.wait()}")
        return line.strip()


def serve(backend: str, commands: BinaryIO, answers: BinaryIO) -> None:
    shape = msgspec.json.decode(commands.readline(), type=KvShape)
    transport = create_transport(backend, OneHost())
    pool = transport.allocate(shape.pool_shape, getattr(torch, shape.dtype), torch.device("cpu"))
    fill(pool.view(torch.uint8).numpy().reshape(-1))
    sender = KvSender(
        transport,
        shape.layout,
        shape.pool_blocks,
        door=OneHost().door(),
        lease_seconds=LEASE_SECONDS,
        on_lease_ended=lambda: None,
    )
    sender.start()
    _write(answers, msgspec.json.encode(Serving(os.getpid(), pool.data_ptr())))
    for number, line in enumerate(commands):
        sender.take_ended()
        handle = sender.lease(
            number,
            msgspec.json.decode(line, type=list[int]),
            prompt_digest=_PROMPT,
            num_tokens=shape.prompt_tokens,
            seed=0,
            cached_tokens=0,
        )
        _write(answers, handle.hex().encode())
    sender.close()
    transport.close()


def _write(stream: BinaryIO, line: bytes) -> None:
    stream.write(line + b"\n")
    stream.flush()


if __name__ == "__main__":
    np.seterr(over="ignore")
    serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
