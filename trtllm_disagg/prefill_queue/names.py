"""Where things are in NATS."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_disagg.config import Role, WorkerConfig
from trtllm_disagg.settings import EndpointParts, parse_endpoint_id

#: The one consumer that all prefill workers pull from.
CONSUMER = "prefill_workers"


@dataclass(frozen=True, slots=True)
class Names:
    """Of one queue: that of the prefill workers of one kind (`pairing.kind_of`) behind one endpoint.

    Endpoints alone would not do: deployments that know nothing of each other may use one NATS server, and all have
    the same endpoints unless they are told otherwise.
    """

    endpoint: EndpointParts
    kind: str

    @classmethod
    def of(cls, config: WorkerConfig, kind: str) -> Names:
        """The same for all workers of a deployment, whichever stage they were when they started."""
        endpoint_id = config.peer_endpoint_id if config.role is Role.PREFILL else config.partner_endpoint_id
        assert endpoint_id is not None, "a worker of both roles has no use for the queue"
        return cls(parse_endpoint_id(endpoint_id), kind)

    @property
    def stream(self) -> str:
        # A stream's name may have no dots, and an endpoint's no colons.
        return ":".join(("trtllm_disagg", *self.endpoint, self.kind))

    @property
    def items(self) -> str:
        return f"{self._root}.items"

    def pusher(self, pusher_id: str) -> str:
        """Where a pusher hears of its items."""
        return f"{self._root}.pusher.{pusher_id}"

    def puller(self, puller_id: str) -> str:
        """Where a prefill worker hears of cancels."""
        return f"{self._root}.puller.{puller_id}"

    @property
    def _root(self) -> str:
        return f"trtllm_disagg.prefill_queue.{self.endpoint.dotted}.{self.kind}"
