"""A handoff whose KV is on another prefill worker, and that no decode has begun to fetch."""

from __future__ import annotations

import logging
from contextlib import aclosing

from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.background import in_background
from trtllm_disagg.handlers.remote import DECODE, StageClient
from trtllm_disagg.protocols.base import HandoffProtocol
from trtllm_disagg.protocols.dynamo import DYNAMO
from trtllm_disagg.types import GenerateRequest

log = logging.getLogger(__name__)


class RemoteDrain:
    """Has a decode worker fetch and drop it, as `LocalDecode.drain` does where there is an engine for that."""

    def __init__(self, client: StageClient, protocol: HandoffProtocol = DYNAMO) -> None:
        self._client = client
        self._protocol = protocol

    def __call__(self, request: GenerateRequest) -> None:
        in_background(self._fetch(request))

    async def _fetch(self, request: GenerateRequest) -> None:
        one_token = self._protocol.encode(request, DECODE) | {"stop_conditions": {"max_tokens": 1}}
        try:
            instance = await self._client.pick(request)
            async with aclosing(instance.call(one_token, None)) as answers:
                async for _ in answers:
                    pass
        except DisaggError as error:
            # Best effort: the lease ends by itself.
            log.info("a handoff that nobody wants waits for the end of its lease: %s", error)
