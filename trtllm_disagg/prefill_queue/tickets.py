"""The queue's messages on NATS, and their subjects: MessagePack of a few dozen bytes, validated on arrival. No prompt
passes through NATS.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import msgspec

from trtllm_disagg.config.settings import EndpointParts, parse_endpoint_id
from trtllm_disagg.config.worker_config import Role, WorkerConfig

#: Larger messages are refused.
MAX_BYTES = 1024

#: An id becomes part of a NATS subject: other characters are forbidden.
Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
Number = Annotated[int, msgspec.Meta(ge=0)]


class Ticket(msgspec.Struct, frozen=True):
    """A request of the worker `asker` waits for a prefill worker. `tokens`: its prompt's length."""

    id: Id
    asker: Id
    tokens: Number


class Offer(msgspec.Struct, frozen=True):
    """The prefill worker `worker` took a ticket: it has room for the request."""

    ticket: Id
    worker: Number


class Answer(Enum):
    """The asker's answer to an offer."""

    #: The asker calls this worker now.
    ACCEPTED = b"+"
    #: The asker refuses this worker: the ticket is for another.
    REFUSED = b"-"
    #: The request no longer waits.
    OVER = b"0"


class UnreadableError(ValueError):
    """The bytes are no message of this queue."""


def encode(message: Ticket | Offer) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """Raises only UnreadableError, whatever the bytes are."""
    if len(data) > MAX_BYTES:
        raise UnreadableError(f"{len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from None


#: The consumer that all prefill workers pull from.
CONSUMER = "prefill_workers"


class Names:
    """The NATS names of one queue: for the prefill workers of one group (`pairing.group_of`) behind one endpoint.

    The endpoint alone would mix deployments on one NATS server, since their default endpoints are equal.
    """

    def __init__(self, endpoint: EndpointParts, kind: str) -> None:
        # A stream's name allows no dots, an endpoint's no colons.
        self.stream = ":".join(("trtllm_disagg_tickets", *endpoint, kind))
        self._root = f"trtllm_disagg.prefill_queue.{endpoint.dotted}.{kind}"
        self.tickets = f"{self._root}.tickets"

    @classmethod
    def of(cls, config: WorkerConfig, kind: str) -> Names:
        """The names are equal for all workers of a deployment, whatever stage they started as."""
        endpoint_id = config.worker_endpoint_id if config.role is Role.PREFILL else config.peer_endpoint_id
        assert endpoint_id is not None, "an agg worker does not use the queue"
        return cls(parse_endpoint_id(endpoint_id), kind)

    def asker(self, asker_id: str) -> str:
        """The subject of offers to one asker."""
        return f"{self._root}.asker.{asker_id}"
