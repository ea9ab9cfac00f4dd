"""The messages on NATS: MessagePack of the types below, bounded and validated where it arrives; and their subjects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from trtllm_disagg import errors
from trtllm_disagg.config.settings import EndpointParts, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig

#: Larger messages are not read. NATS itself refuses more than its max_payload, 1 MiB by default.
MAX_BYTES = 8 << 20
MAX_AVOIDED = 64
MAX_ERROR_CHARS = 2000
MAX_ID_CHARS = 256

#: An id becomes part of a NATS subject, so it may have no other characters.
Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
InstanceId = Annotated[int, msgspec.Meta(ge=0)]


class Item(msgspec.Struct, frozen=True):
    """One prefill that a request waits for. The prefill worker sends its answer to `pusher`."""

    id: Id
    pusher: Id
    #: Goes into logs, so control characters are refused.
    request_id: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS, pattern=r"^[^\x00-\x1f\x7f]*\Z")] | None
    #: Instances that failed this request already.
    avoid: Annotated[list[InstanceId], msgspec.Meta(max_length=MAX_AVOIDED)]
    #: The body, as for any other worker (`wire.bodies.encode_request`).
    request: dict[str, Any]
    #: Instances that the pusher's circuit breaker skips: they run the item only if no other one takes it.
    skipped: Annotated[list[InstanceId], msgspec.Meta(max_length=MAX_AVOIDED)] = []


class _OfAttempt(msgspec.Struct, frozen=True, tag=True):
    """A message from the prefill worker to the pusher. `attempt`: JetStream's count of deliveries of the item."""

    item: Id
    attempt: Annotated[int, msgspec.Meta(ge=1)]


class Claim(_OfAttempt, frozen=True, tag=True):
    """The prefill worker asks whether it may run the item. Answered with YES or NO."""

    worker: InstanceId


class Beat(_OfAttempt, frozen=True, tag=True):
    """The prefill worker still runs the item."""


class Answer(_OfAttempt, frozen=True, tag=True):
    """The one chunk of a prefill. A pusher that answers YES takes over the duty to release the KV."""

    chunk: dict[str, Any]


class Failed(_OfAttempt, frozen=True, tag=True):
    category: str
    message: Annotated[str, msgspec.Meta(max_length=MAX_ERROR_CHARS)]

    def error(self) -> errors.DisaggError:
        """The error that the prefill worker has raised; of an unknown category: EngineError."""
        return _BY_CATEGORY.get(self.category, errors.EngineError)(self.message)


FromPuller = Claim | Beat | Answer | Failed

YES, NO = b"+", b"-"

#: The category of an answer that NATS does not take: the request goes on without the queue.
TOO_LARGE = "TooLarge"
_BY_CATEGORY: dict[str, type[errors.DisaggError]] = {
    # A prefill worker that leaves, or cancels a request whose client has not left, counts as gone.
    errors.WorkerLeavingError.category: errors.PeerUnavailableError,
    errors.RequestCancelledError.category: errors.PeerUnavailableError,
    errors.InvalidRequestError.category: errors.InvalidRequestError,
    errors.OverloadedError.category: errors.OverloadedError,
    errors.PeerUnavailableError.category: errors.PeerUnavailableError,
    errors.StageTimeoutError.category: errors.StageTimeoutError,
    TOO_LARGE: errors.QueueUnusableError,
}


class UnreadableError(ValueError):
    """The bytes are no message of this queue."""


def encode(message: Item | FromPuller | dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """Raises UnreadableError, and nothing else, whatever the bytes are."""
    if len(data) > MAX_BYTES:
        raise UnreadableError(f"{len(data)} bytes, of which {MAX_BYTES} are allowed")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from None


#: The one consumer that all prefill workers pull from.
CONSUMER = "prefill_workers"


@dataclass(frozen=True, slots=True)
class Names:
    """The names in NATS of one queue: that of the prefill workers of one kind (`pairing.kind_of`) behind one endpoint.

    The endpoint alone would not do: independent deployments may share one NATS server, and all have the same
    endpoints by default.
    """

    endpoint: EndpointParts
    kind: str

    @classmethod
    def of(cls, config: WorkerConfig, kind: str) -> Names:
        """The names are the same for all workers of a deployment, whichever stage they were when they started."""
        endpoint_id = config.worker_endpoint_id if config.role is Role.PREFILL else config.peer_endpoint_id
        assert endpoint_id is not None, "an agg worker does not use the queue"
        return cls(parse_endpoint_id(endpoint_id), kind)

    @property
    def stream(self) -> str:
        # A stream's name may have no dots, and an endpoint's no colons.
        return ":".join(("trtllm_disagg", *self.endpoint, self.kind))

    @property
    def items(self) -> str:
        return f"{self._root}.items"

    def pusher(self, pusher_id: str) -> str:
        """The subject of messages to a pusher about its items."""
        return f"{self._root}.pusher.{pusher_id}"

    def puller(self, instance_id: int) -> str:
        """The subject of notices to a prefill worker about prefills that it has answered."""
        return f"{self._root}.puller.{instance_id:x}"

    def cancel(self, item_id: str) -> str:
        """The subject on which the pusher tells the prefill worker that runs an item to stop."""
        return f"{self._root}.cancel.{item_id}"

    @property
    def _root(self) -> str:
        return f"trtllm_disagg.prefill_queue.{self.endpoint.dotted}.{self.kind}"
