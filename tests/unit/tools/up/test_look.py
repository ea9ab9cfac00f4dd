"""What `up` and the commands of a fleet see of workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.tools.up import supervisor as module
from trtllm_disagg.tools.up.commands import Description
from trtllm_disagg.tools.up.look import Described, FirstStages, phase_of
from trtllm_disagg.tools.up.reconcile import Phase
from trtllm_disagg.tools.up.supervisor import Supervisor

DECODE = Description(Role.DECODE, "decode_first", "m", registered=True, state="serving")


async def test_a_first_stage_that_was_a_second_one_meanwhile_is_asked_for_again() -> None:
    asked: list[tuple[str, int, bool]] = []
    why = ["not known", "", ""]

    class Asked(FirstStages):
        async def why_not(self, model: str, instance: int, is_new: bool, waited: float) -> str:
            asked.append((model, instance, is_new))
            return why.pop(0)

    first = Asked()
    second = msgspec.structs.replace(DECODE, strategy="prefill_first", registered=False)
    seen = [await first.has("7", told, Phase.SERVING, is_new=False) for told in (DECODE, DECODE, DECODE)]
    assert (seen, asked) == ([False, True, True], [("m", 7, False)] * 2)
    assert not await first.has("7", second, Phase.SERVING, is_new=False)
    assert await first.has("7", DECODE, Phase.SERVING, is_new=False)
    assert len(asked) == 3


def test_a_worker_that_leaves_does_not_serve_although_it_is_ready() -> None:
    states = {"serving": Phase.SERVING, "unlisted": Phase.LEAVING, "draining": Phase.LEAVING}
    for state, phase in states.items():
        assert phase_of(msgspec.structs.replace(DECODE, state=state)) is phase
    assert phase_of(msgspec.structs.replace(DECODE, ready=False, state="listed")) is Phase.STARTING
    assert phase_of(msgspec.structs.replace(DECODE, becomes="prefill")) is Phase.LEAVING


async def test_a_worker_of_an_older_order_is_ready_to_be_switched_though_no_frontend_knows_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loaded during a switch, and then all others died."""

    async def told(port: int) -> Described:
        return Described("7", msgspec.structs.replace(DECODE, strategy="prefill_first", registered=False))

    async def yes(*_: object) -> bool:
        return True

    for name, instead in (("described", told), ("is_ready", yes), ("lacks_model", yes)):
        monkeypatch.setattr(module, name, instead)
    monkeypatch.setattr(supervisor, "processes", [SimpleNamespace(role="frontend", state="ready", spec=None)])
    worker: Any = SimpleNamespace(role="decode", spec=SimpleNamespace(system_port=1))
    assert await supervisor._is_ready(worker)
