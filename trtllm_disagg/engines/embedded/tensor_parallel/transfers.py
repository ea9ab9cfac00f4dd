"""KV transfer with several ranks: every rank serves its own pool and reads into it, on rank 0's command.

Rank 0 has the leases, the control channel and the requests; to these, all ranks' pools look like one transport. The
commands have their own socket and thread, since a read may take longer than a step. So they may overtake steps and
copies of blocks, and a read names the number of those that it must follow.

If prefill and decode divide their heads differently, two ranks share only a short part of every slot
(`kv[block, layer, k|v, slot, head, dim]`). Single reads are slow (docs/log/kv-transfer.md), so a rank reads full blocks
into memory beside the pool, and copies the heads out of it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch

from trtllm_disagg import errors
from trtllm_disagg.engines.embedded.kv_transfer.base import (
    STAGING_BYTES,
    BlockPairs,
    PeerMetadata,
    ReadTimeoutError,
    StagingTransport,
    decoded_address,
)
from trtllm_disagg.engines.embedded.kv_transfer.connections import MAX_PEER_THREADS
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport
from trtllm_disagg.engines.embedded.tensor_parallel.group import Channel, OtherRank
from trtllm_disagg.errors import ConfigError, HandoffRefusedError, KvTransferError

#: Prefix of a multi-rank sender's address; no transport's address starts with it.
_SHARDED = b"trtllm-disagg shards\0"
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Overlap:
    """Heads that a sender's rank and this rank share, by the index of each."""

    shard: int
    theirs: slice
    mine: slice


def overlaps(rank: int, num_ranks: int, num_shards: int, num_heads: int) -> list[Overlap]:
    """For `num_heads` divided evenly among `num_ranks` here and `num_shards` at the sender."""
    mine, theirs = num_heads // num_ranks, num_heads // num_shards
    begin, end = rank * mine, (rank + 1) * mine
    found = []
    for shard in range(begin // theirs, -(-end // theirs)):
        offset = shard * theirs
        first, last = max(begin, offset), min(end, offset + theirs)
        found.append(Overlap(shard, slice(first - offset, last - offset), slice(first - begin, last - begin)))
    return found


class Shard(msgspec.Struct, frozen=True):
    """The pool of one rank of a sender: all blocks, with its part of the KV heads."""

    sender: str
    address: bytes


def join_addresses(shards: list[Shard]) -> bytes:
    """`PeerMetadata.address` of these ranks, rank 0 first."""
    return shards[0].address if len(shards) == 1 else _SHARDED + _encoder.encode(shards)


def shards_of(peer: PeerMetadata) -> list[PeerMetadata]:
    """Metadata of each rank. Raises KvTransferError for an unreadable address."""
    if not peer.address.startswith(_SHARDED):
        return [peer]
    joined = msgspec.structs.replace(peer, address=peer.address.removeprefix(_SHARDED))
    shards = decoded_address(joined, list[Shard])
    return [msgspec.structs.replace(peer, sender=s.sender, address=s.address) for s in shards]


class ShardReader:
    """Fills one rank's pool from a sender with any number of ranks."""

    def __init__(
        self,
        transport: StagingTransport,
        pool: torch.Tensor,
        rank: int,
        num_ranks: int,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._transport = transport
        self._staging_bytes = staging_bytes
        self._pool = pool
        self._rank, self._num_ranks = rank, num_ranks

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        """KvTransport.read of this rank's heads; in place if both ends are divided alike."""
        shards = shards_of(peer)
        if len(shards) == self._num_ranks:
            return self._transport.read(shards[self._rank], blocks, timeout)
        if not shards or peer.layout.num_kv_heads % len(shards) or self._pool.is_cuda:
            raise HandoffRefusedError(
                f"prefill has tensor_parallel_size {len(shards)}, decode {self._num_ranks}: "
                "the KV of such a pair must divide evenly, on CPUs"
            )
        deadline = time.monotonic() + timeout
        heads = peer.layout.num_kv_heads // len(shards)
        return sum(
            self._read_part(shards[part.shard], heads, part, blocks, deadline)
            for part in overlaps(self._rank, self._num_ranks, len(shards), peer.layout.num_kv_heads)
        )

    def forget(self, peer: PeerMetadata) -> None:
        for shard in shards_of(peer):
            self._transport.forget(shard)

    def _read_part(
        self, metadata: PeerMetadata, heads: int, part: Overlap, blocks: BlockPairs, deadline: float
    ) -> int:
        """Read from a rank with `heads`; returns all bytes received, unwanted heads included."""
        pool = _as_bytes(self._pool)
        _, rows, _, head_bytes = pool.shape
        block_bytes = rows * heads * head_bytes
        at_once = max(1, self._staging_bytes // block_bytes)
        for start in range(0, len(blocks.remote), at_once):
            remote, local = (ids[start : start + at_once] for ids in blocks)
            try:
                with self._transport.fetched(
                    metadata, remote, block_bytes, max(0.0, deadline - time.monotonic())
                ) as fetched:
                    theirs = fetched.reshape(-1, rows, heads, head_bytes)
                    pool[local, :, part.mine] = theirs[:, :, part.theirs]
            except ReadTimeoutError as error:
                # A late read never lands in the pool.
                raise KvTransferError(str(error)) from error
        return int(len(blocks.remote) * block_bytes)


def _as_bytes(pool: torch.Tensor) -> np.ndarray:
    """(blocks, rows, heads, bytes of a head)"""
    blocks, layers, two, slots, heads, _ = pool.shape
    array: np.ndarray = pool.view(torch.uint8).numpy().reshape(blocks, layers * two * slots, heads, -1)
    return array


_GRACE_SECONDS = 5.0


def transport_of(backend: str, device: torch.device) -> StagingTransport:
    """This rank's transport for `backend`. Raises ConfigError as `create_transport`."""
    return create_transport(backend, needs_cma=device.type == "cpu")


class Serve(msgspec.Struct, tag="serve"):
    id: int
    sender: str


class Read(msgspec.Struct, tag="read"):
    id: int
    metadata: PeerMetadata
    #: int32 block ids.
    remote: bytes
    local: bytes
    timeout: float
    #: Number of other commands (group.py) to execute first: they may use the blocks that it fills.
    after: int = 0


class HasEnded(msgspec.Struct, tag="has-ended"):
    """Has a late read ended?"""

    id: int
    read: int


class Forget(msgspec.Struct, tag="forget"):
    metadata: PeerMetadata


class Tick(msgspec.Struct, tag="tick"):
    """A receiver may be connecting."""


class Close(msgspec.Struct, tag="close"):
    pass


TransferCommand = Serve | Read | HasEnded | Forget | Tick | Close


class Done(msgspec.Struct):
    """The answer to Serve, Read and HasEnded."""

    id: int
    moved: int = 0
    address: bytes = b""
    #: For Serve: this rank's transport.
    transport: str = ""
    error: str = ""
    error_class: str = ""
    may_land_later: bool = False


_commands = msgspec.msgpack.Decoder(TransferCommand)
_answers = msgspec.msgpack.Decoder(Done)


class TeamTransport:
    """`KvTransport` over the pools of all ranks (or of one: the sender may have several)."""

    def __init__(self, transport: StagingTransport, others: Sequence[OtherRank]) -> None:
        self.name = transport.name
        self._transport = transport
        self._helpers = [_Helper(other) for other in others]
        self._reader: ShardReader | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Rank 0's pool; the others make their own."""
        pool = self._transport.allocate(shape, dtype, device)
        self._reader = ShardReader(self._transport, pool, 0, 1 + len(self._helpers))
        return pool

    def serve(self, sender: str) -> bytes:
        shards = [Shard(sender, self._transport.serve(sender))]
        for helper in self._helpers:
            name = f"{sender}/{helper.rank}"
            served = _require(helper.serve(name).result())
            if served.transport != self.name:
                raise ConfigError.bad_value(
                    "cache_transceiver_config.backend",
                    "DEFAULT",
                    f"a transport by name: rank 0 finds {self.name}, rank {helper.rank} {served.transport}",
                )
            shards.append(Shard(name, served.address))
        return join_addresses(shards)

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        """Read on all ranks at once. Returns when all have ended or failed."""
        assert self._reader is not None
        reads = [helper.read(peer, blocks, timeout) for helper in self._helpers]
        parts: list[Callable[[], int]] = [partial(self._reader.read, peer, blocks, timeout), *reads]
        moved, failures = 0, list[Exception]()
        for part in parts:
            try:
                moved += part()
            except Exception as error:  # the other ranks' reads may still land
                failures.append(error)
        late = [e for e in failures if isinstance(e, ReadTimeoutError) and e.may_land_later]
        if late:
            raise ReadTimeoutError(
                str(late[0]), may_land_later=True, has_ended=lambda: all(e.has_ended() for e in late)
            )
        if failures:
            raise failures[0]
        return moved

    def write(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> int:
        """For engines of one rank; the core refuses GENERATION_FIRST for others."""
        if self._helpers or len(shards_of(peer)) > 1:
            raise KvTransferError("KV is pushed between engines of tensor_parallel_size 1 only")
        return self._transport.write(peer, blocks, timeout)

    def forget(self, peer: PeerMetadata) -> None:
        assert self._reader is not None
        for helper in self._helpers:
            helper.send(Forget(peer))
        with contextlib.suppress(KvTransferError):
            self._reader.forget(peer)

    def progress(self) -> None:
        for helper in self._helpers:
            helper.send(Tick())
        self._transport.progress()

    def close(self) -> None:
        for helper in self._helpers:
            helper.send(Close())
        self._transport.close()


def _require(done: Done) -> Done:
    """Raise the other rank's error."""
    if not done.error_class:
        return done
    if done.error_class == ReadTimeoutError.__name__:
        raise ReadTimeoutError(done.error, may_land_later=done.may_land_later)
    raise errors.named(done.error_class, done.error) or KvTransferError(f"{done.error_class}: {done.error}")


class _Helper:
    """Rank 0's end of another rank's transfers. Thread-safe."""

    def __init__(self, other: OtherRank) -> None:
        self.rank = other.rank
        self._other = other
        self._channel = other.transfers
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Done]] = {}
        threading.Thread(target=self._receive, name=f"kv-rank-{other.rank}", daemon=True).start()

    def serve(self, sender: str) -> Future[Done]:
        return self.ask(Serve(next(self._ids), sender))

    def read(self, peer: PeerMetadata, blocks: BlockPairs, timeout: float) -> Callable[[], int]:
        """Begin that rank's part of a read. The returned call waits for its end, and raises as KvTransport.read."""
        ids = blocks.remote.tobytes(), blocks.local.tobytes()
        command = Read(next(self._ids), peer, *ids, timeout, self._other.settled)
        answer = self.ask(command)

        def has_ended() -> bool:
            return answer.done() and (not answer.result().may_land_later or self.has_ended(command.id))

        def moved() -> int:
            is_done = bool(wait([answer], timeout + _GRACE_SECONDS).done)
            if is_done and not answer.result().may_land_later:
                return _require(answer.result()).moved
            reason = answer.result().error if is_done else "a rank did not report the end of its read"
            raise ReadTimeoutError(reason, may_land_later=True, has_ended=has_ended)

        return moved

    def has_ended(self, read: int) -> bool:
        """True once a late read has ended; False if the rank does not answer in time."""
        answer = self.ask(HasEnded(next(self._ids), read))
        return bool(wait([answer], _GRACE_SECONDS).done) and not _require(answer.result()).may_land_later

    def send(self, command: msgspec.Struct) -> None:
        with self._lock, contextlib.suppress(OSError):  # other code ends the engine of a lost rank
            self._channel.send(command)

    def ask(self, command: Serve | Read | HasEnded) -> Future[Done]:
        future: Future[Done] = Future()
        self._pending[command.id] = future
        self.send(command)
        return future

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                done = self._channel.receive(_answers)
                self._pending.pop(done.id).set_result(done)
        for future in list(self._pending.values()):
            future.set_exception(KvTransferError(f"rank {self.rank} of the engine is gone"))


class TransferService:
    """Executes rank 0's transfer commands on another rank's transport."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._built: Future[tuple[StagingTransport, ShardReader]] = Future()
        #: `ReadTimeoutError.has_ended` of late reads, by command id.
        self._late: dict[int, Callable[[], bool]] = {}
        self._num_executed = 0
        self._progress = threading.Condition()
        self._readers = ThreadPoolExecutor(MAX_PEER_THREADS, "kv-pull")
        threading.Thread(target=self._serve, name="kv-commands", daemon=True).start()

    def start(self, transport: StagingTransport, pool: torch.Tensor, rank: int, num_ranks: int) -> None:
        self._built.set_result((transport, ShardReader(transport, pool, rank, num_ranks)))

    def executed(self) -> None:
        """Count one more of the other commands as executed."""
        with self._progress:
            self._num_executed += 1
            self._progress.notify_all()

    def fail(self, error: Exception) -> None:
        """Report that this rank cannot be built: rank 0 may be waiting for it."""
        if not self._built.done():
            self._built.set_exception(error)

    def _serve(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while not isinstance(command := self._channel.receive(_commands), Close):
                self._execute(command)
        self._readers.shutdown(cancel_futures=True)
        if self._built.done() and self._built.exception() is None:
            self._built.result()[0].close()

    def _execute(self, command: TransferCommand) -> None:
        match command:
            case Serve():
                self._answer(command.id, lambda: self._serve_pool(command))
            case Read():
                self._readers.submit(self._answer, command.id, lambda: self._read(command))
            case HasEnded():
                self._answer(command.id, lambda: self._has_ended_now(command))
            case Tick():
                self._transport.progress()
            case Forget():
                with contextlib.suppress(KvTransferError):
                    self._built.result()[1].forget(command.metadata)

    @property
    def _transport(self) -> StagingTransport:
        """Wait for the transport; raises the error that prevents it."""
        return self._built.result()[0]

    def _serve_pool(self, command: Serve) -> Done:
        transport = self._transport
        return Done(command.id, address=transport.serve(command.sender), transport=transport.name)

    def _read(self, command: Read) -> Done:
        end = time.monotonic() + command.timeout
        with self._progress:
            if not self._progress.wait_for(lambda: self._num_executed >= command.after, command.timeout):
                raise KvTransferError(f"a rank was busy for {command.timeout:g} s: its KV was not read")
        blocks = BlockPairs(*(np.frombuffer(ids, np.int32) for ids in (command.remote, command.local)))
        _, reader = self._built.result()
        left = max(0.0, end - time.monotonic())
        return Done(command.id, moved=reader.read(command.metadata, blocks, left))

    def _has_ended_now(self, command: HasEnded) -> Done:
        if command.read in self._late and self._late[command.read]():
            del self._late[command.read]
        return Done(command.id, may_land_later=command.read in self._late)

    def _answer(self, command_id: int, work: Callable[[], Done]) -> None:
        try:
            done = work()
        except Exception as error:  # rank 0 waits for an answer
            done = Done(command_id, error=str(error), error_class=type(error).__name__)
            if isinstance(error, ReadTimeoutError) and error.may_land_later:
                self._late[command_id] = error.has_ended
                done.may_land_later = True
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(done)
