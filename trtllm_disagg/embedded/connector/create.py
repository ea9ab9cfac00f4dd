"""KV handoffs as the engine core uses them: check, lease, pull; or a null object when disaggregation is off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from trtllm_disagg.embedded.connector.connector import Meetings, NoMeetings, PullsOnly, TwoSidedMeetings
from trtllm_disagg.embedded.connector.core_hooks import CoreHooks
from trtllm_disagg.embedded.connector.pull import Pulling
from trtllm_disagg.embedded.connector.push import Pushing
from trtllm_disagg.embedded.connector.push_receiver import Expecting
from trtllm_disagg.embedded.ipc.messages import AddRequest
from trtllm_disagg.embedded.model.sizing import PoolShape
from trtllm_disagg.embedded.params.llm_args import LlmArgs
from trtllm_disagg.embedded.params.supported_args import reach_of
from trtllm_disagg.embedded.scheduler.sequence import Sequence
from trtllm_disagg.embedded.tensor_parallel.channel import Peer
from trtllm_disagg.embedded.tensor_parallel.transfers import TeamTransport
from trtllm_disagg.errors import ConfigError, HandoffRefusedError, InvalidRequestError
from trtllm_disagg.kv_transfer.access import Reach
from trtllm_disagg.kv_transfer.base import KvLayout, KvTransport, prompt_digest
from trtllm_disagg.kv_transfer.control import Desks
from trtllm_disagg.kv_transfer.handle import (
    Failure,
    KvHandle,
    Notice,
    Offer,
    StillOffered,
    Watch,
    Withdraw,
    decode_handle,
)
from trtllm_disagg.kv_transfer.host import new_memory
from trtllm_disagg.kv_transfer.pull import KvReceiver, KvSender
from trtllm_disagg.kv_transfer.push import KvPusher, OfferBook
from trtllm_disagg.kv_transfer.push_receiver import KvExpecter
from trtllm_disagg.kv_transfer.transports import create_transport, is_needed

log = logging.getLogger(__name__)

_DEFAULT_TIMEOUT_MS = 60_000


class KvTransfers:
    """One engine's sender and receiver over one transport."""

    def __init__(
        self,
        transport: KvTransport,
        layout: KvLayout,
        num_blocks: int,
        args: LlmArgs,
        reach: Reach,
        wake: Callable[[], None],
    ) -> None:
        config = args.cache_transceiver_config
        assert config is not None
        seconds = (config.kv_transfer_timeout_ms or _DEFAULT_TIMEOUT_MS) / 1000
        door = reach.door()
        self._transport = transport
        self._kind_of_meetings = TwoSidedMeetings if args.tensor_parallel_size == 1 else PullsOnly
        self._layout = layout
        self._sender = KvSender(
            transport,
            layout,
            num_blocks,
            door=door,
            lease_seconds=seconds,
            on_lease_ended=wake,
        )
        self._receiver = KvReceiver(transport, layout, door=door, timeout_seconds=seconds, on_finished=wake)
        client, lanes = self._receiver.client, self._receiver.lanes
        fingerprint = layout.fingerprint()
        self._seconds = seconds
        self._book = OfferBook(self._sender.name, fingerprint, wake)
        self._pusher = KvPusher(transport, client, lanes, timeout_seconds=seconds, on_finished=wake)
        self._expecter = KvExpecter(
            self._sender.name,
            self.endpoint,
            fingerprint,
            self._receiver.cards,
            client,
            lanes,
            on_news=wake,
            on_busy=self._sender.pump.hurry,
        )
        desks: Desks = {
            Offer: self._book.offered,
            Withdraw: lambda message, _: self._book.withdrawn(message),
            Watch: lambda message, _: self._book.watched(message),
            Notice: lambda message, _: self._expecter.noticed(message),
            Failure: lambda message, _: self._expecter.failed(message),
            StillOffered: lambda message, _: self._expecter.still_offered(message),
        }
        self._sender.start(desks, lambda: self._expecter.is_busy)
        self.description = f"{transport.name} (leases and reads end after {seconds:g} s)"
        log.info(
            "KV transfer by %s as %s, control channel %s", self.description, self._sender.name, self.endpoint
        )

    @property
    def endpoint(self) -> str:
        return self._sender.endpoint

    @property
    def num_leases(self) -> int:
        return len(self._sender.leases)

    def meetings(self, hooks: CoreHooks) -> Meetings:
        """How sequences meet their other halves."""
        return self._kind_of_meetings(
            Pulling(self._receiver, hooks),
            Pushing(self._book, self._pusher, self._seconds, hooks),
            Expecting(self._expecter, self._seconds, hooks),
            hooks,
        )

    def accept(self, request: AddRequest) -> KvHandle:
        """Raise HandoffRefusedError unless the handoff is of this prompt and fits this engine."""
        if request.handoff is None:
            raise HandoffRefusedError("a generation_only request needs opaque_state and first_gen_tokens")
        handle = decode_handle(request.handoff.opaque_state)
        if handle.prompt != prompt_digest(request.prompt, request.cache_salt):
            raise HandoffRefusedError("the handoff belongs to another prompt")
        expected = -(-len(request.prompt) // self._layout.tokens_per_block)
        if handle.layout == self._layout.fingerprint() and (
            handle.num_tokens != len(request.prompt) or len(handle.blocks) != expected
        ):
            raise HandoffRefusedError(
                f"the handoff holds {len(handle.blocks)} blocks for {handle.num_tokens} tokens; "
                f"this prompt of {len(request.prompt)} tokens has {expected}"
            )
        return handle

    def lease(self, sequence: Sequence) -> bytes:
        blocks = sequence.blocks
        sequence.blocks = []
        return self._sender.lease(
            sequence.request_id,
            blocks,
            prompt_digest=prompt_digest(sequence.tokens[: sequence.num_prompt], sequence.cache_salt),
            num_tokens=sequence.num_prompt,
            seed=sequence.seed,
            cached_tokens=sequence.num_cached,
        )

    def release_request(self, request_id: int) -> None:
        self._sender.leases.release_request(request_id)

    def decline(self, handle: KvHandle) -> None:
        self._receiver.release(handle)

    def take_ended_leases(self) -> list[list[int]]:
        return [lease.blocks for lease in self._sender.take_ended()]

    def seconds_to_deadline(self) -> float | None:
        deadline = self._sender.leases.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def close(self) -> None:
        self._expecter.close()
        self._receiver.close()
        self._sender.close()
        self._transport.close()


class NullTransfers:
    """Disaggregation is off: no cache_transceiver_config, no handoffs."""

    description = "off"
    endpoint = ""
    num_leases = 0

    def meetings(self, hooks: CoreHooks) -> Meetings:
        return NoMeetings(hooks)

    def accept(self, request: AddRequest) -> KvHandle:
        raise InvalidRequestError("this engine has no cache_transceiver_config, so it takes no handoffs")

    def lease(self, sequence: Sequence) -> bytes:
        raise ConfigError("this engine has no cache_transceiver_config, so it makes no handoffs")

    def release_request(self, request_id: int) -> None:
        """Nothing is held."""

    def decline(self, handle: KvHandle) -> None:
        """Nothing was accepted."""

    def take_ended_leases(self) -> list[list[int]]:
        return []

    def seconds_to_deadline(self) -> float | None:
        return None

    def close(self) -> None:
        """Nothing to close."""


def create_transfers(
    args: LlmArgs, layout: KvLayout, pool: PoolShape, wake: Callable[[], None], peers: Seq[Peer] = ()
) -> tuple[KvTransfers | NullTransfers, torch.Tensor]:
    """The transfers and the pool, which must live in memory that the transport can serve.

    `peers` are the other ranks, with pools of their own.
    """
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return NullTransfers(), new_memory(pool.shape, pool.dtype, pool.device)
    reach = reach_of(args)
    chosen = create_transport(
        config.backend,
        reach,
        needs_cma=is_needed(reach, pool.device.type),
        on_gpu=pool.device.type == "cuda",
    )
    transport = TeamTransport(chosen, peers)
    kv = transport.allocate(pool.shape, pool.dtype, pool.device)
    return KvTransfers(transport, layout, pool.num_blocks, args, reach, wake), kv
