"""The workers of a namespace, asked from outside, with clients of Dynamo that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from trtllm_disagg.admin.commands import KeySigner
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.dynamo_runtime.controller import Controller
from trtllm_disagg.errors import StageTimeoutError

ENDPOINT = "dyn://mine.backend.generate"
FROZEN, DEAD = 2, 3


class Said:
    def is_error(self) -> bool:
        return False

    def data(self) -> dict[str, str]:
        return {"role": "decode"}


class Client:
    def instance_ids(self) -> list[int]:
        return [1, FROZEN, DEAD]

    async def direct(self, request: object, instance_id: int) -> AsyncIterator[Said]:
        if instance_id == FROZEN:
            await asyncio.Event().wait()
        if instance_id == DEAD:
            raise ConnectionError("reset")
        return self._answers()

    async def _answers(self) -> AsyncIterator[Said]:
        yield Said()


def made() -> Controller:
    return Controller({ENDPOINT: Client()}, KeySigner(AdminKey(b"k" * 32)), timeout=0.05)


async def test_a_frozen_worker_is_an_error_for_commands_that_need_every_worker() -> None:
    with pytest.raises(StageTimeoutError, match="instance 2 at"):
        await made().workers()
