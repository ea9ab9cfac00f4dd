"""The workers of the other role, through Dynamo."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from trtllm_disagg import errors
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.types import RequestContext


class DynamoDirectory:
    """The instances at an endpoint."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def instance_ids(self) -> list[int]:
        ids: list[int] = self._client.instance_ids()
        return ids

    def instance(self, instance_id: int) -> DynamoStageInstance:
        return DynamoStageInstance(self._client, instance_id)

    async def describe(self) -> dict[str, Any]:
        """What any of them says of itself. Raises a DisaggError."""
        for instance_id in self.instance_ids():
            return await self.instance(instance_id).describe()
        raise errors.NoInstanceError("no instance of the other stage is there")


class DynamoStageInstance:
    """One of them. Whatever becomes of it is translated."""

    def __init__(self, client: Any, instance_id: int) -> None:
        self._client = client
        self.instance_id = instance_id

    async def describe(self) -> dict[str, Any]:
        async with aclosing(self.call({DESCRIBE: True}, None)) as answers:
            async for answer in answers:
                return answer
        raise errors.PeerUnavailableError("an instance of the other stage did not describe itself")

    async def tell(self, notice: dict[str, Any]) -> None:
        async with aclosing(self.call(notice, None)) as answers:
            async for _ in answers:
                pass

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            # The context carries request id, trace and cancellation.
            stream = await self._client.direct(request, self.instance_id, annotated=False, context=context)
            async for item in stream:
                yield item
        except errors.DisaggError as error:
            error.peer = self.instance_id
            raise
        except Exception as error:
            translated = from_dynamo(error)
            translated.peer = self.instance_id
            raise translated from error
