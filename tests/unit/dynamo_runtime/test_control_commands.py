"""Control commands: what a worker takes, what it refuses by name, and that no frontend's request is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.handling import raw_request
from tests.support.stage_client import FakeContext
from trtllm_disagg.admin.commands import CONTROL, Signer, Switch, decode_command, is_control
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.errors import EngineError, InvalidRequestError, StageTimeoutError
from trtllm_disagg.strategies import STRATEGIES, switchable
from trtllm_disagg.tools.admin.controller import Controller
from trtllm_disagg.types import Generate

SWITCHABLE = f"expected one of {', '.join(switchable())};"


SIGNER = Signer(AdminKey(b"k" * 32))
COMMAND = SIGNER.request(Switch("auto"), 7)


def test_a_command_travels_under_the_one_key_that_workers_of_other_versions_know() -> None:
    assert list(COMMAND) == ["trtllm_disagg.control"]
    assert is_control(COMMAND)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (None, "expected a command of switch, set"),
        ([], "expected a command of switch, set"),
        ({"command": "stop"}, "stop"),
        ({"command": "describe"}, "describe"),
        ({"command": "switch"}, "to"),
        ({"command": "switch", "to": 5}, r"\$.to"),
        ({"command": "switch", "to": "decode_first", "now": True}, "now"),
        ({"command": "switch", "to": "sideways"}, SWITCHABLE),
        *(({"command": "switch", "to": to}, SWITCHABLE) for to in STRATEGIES if to not in switchable()),
        ({"command": "set", "values": {"a": [1]}}, "values"),
    ],
)
def test_unknown_control_command_is_refused_by_name(raw: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        decode_command(raw)


def _refuses() -> Generate:
    def generate(request: Any, context: Any) -> Any:
        raise EngineError("it was asked for tokens")

    return generate


async def _answers(raw: dict[str, Any]) -> list[Any]:
    async def handle_command(command: Any) -> dict[str, Any]:
        return {"handled": command}

    handler = Handler(_refuses(), dict, handle_command).function
    return [answer async for answer in handler(raw, context=FakeContext())]


async def test_a_command_is_handled_and_a_request_with_tokens_never_is() -> None:
    assert await _answers(COMMAND) == [{"handled": COMMAND[CONTROL]}]
    # Whatever comes from a frontend has tokens.
    with pytest.raises(Exception, match="it was asked for tokens"):
        await _answers(raw_request() | COMMAND)


async def test_a_worker_without_a_stage_state_refuses_commands() -> None:
    handler = Handler(_refuses(), dict).function
    with pytest.raises(Exception, match="takes no control commands"):
        [answer async for answer in handler(COMMAND, context=FakeContext())]


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
    return Controller({ENDPOINT: Client()}, SIGNER, timeout=0.05)


async def test_a_frozen_worker_is_an_error_for_commands_that_need_every_worker() -> None:
    with pytest.raises(StageTimeoutError, match="instance 2 at"):
        await made().workers()
