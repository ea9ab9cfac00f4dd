"""A worker that changes its place while it serves: in which order, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.handling import request, until
from tests.support.stage_client import FakeContext
from tests.support.trying import counts_of, trying
from trtllm_disagg.admin.commands import Command, Verifier, decode_command
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.worker_endpoint import DynamoRegistration
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.errors import ConfigError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.services import LiveState
from trtllm_disagg.types import GenerateRequest, PhaseRequest, TokenChunk
from trtllm_disagg.worker.stage_state import StageState


class FakeRegistration:
    """`history` has the strategy at the time of each change."""

    def __init__(self) -> None:
        self.is_at_frontends = False
        self.history: list[tuple[str, str]] = []
        self.live: LiveState | None = None
        self.error: Exception | None = None
        self.stand_by_error: Exception | None = None
        #: File discovery has dropped this worker.
        self.has_been_dropped = False
        #: Peers may listen to this worker's cache events.
        self.is_at_peers = False

    async def enter(self) -> None:
        self.is_at_peers = False
        await self._change("enter", True)

    async def leave(self) -> None:
        await self._change("leave", False)

    async def stand_by(self) -> None:
        if self.stand_by_error is not None:
            raise self.stand_by_error
        self.is_at_peers = True

    async def is_lost(self) -> bool:
        return self.has_been_dropped

    async def renew(self) -> None:
        await self._change("renew", self.is_at_frontends)
        self.has_been_dropped = False

    async def _change(self, word: str, is_at_frontends: bool) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        assert self.live is not None
        self.history.append((word, self.live.strategy.value))
        self.is_at_frontends = is_at_frontends


class Trusting(Verifier):
    """Signatures are tests/unit/admin/test_signed_command.py's."""

    def __init__(self) -> None:
        super().__init__(None, 0)

    def command_of(self, raw: Any) -> Command:
        return decode_command(raw)


class Others:
    def __init__(self, *ids: int, max_seq_len: int | None = None) -> None:
        self._ids = list(ids)
        self._facts = [EngineFacts(max_seq_len)] * len(ids)

    def instance_ids(self) -> list[int]:
        return self._ids

    def facts(self) -> list[EngineFacts]:
        return self._facts

    async def learn(self) -> None:
        """All is known."""


def stage_state(
    role: str, strategy: str, others: Others | None = None, **settings: Any
) -> tuple[StageState, FakeRegistration, LiveState]:
    config = WorkerConfig(model="m", role=Role(role), strategy=strategy, **settings)
    registration, live = FakeRegistration(), LiveState.of(config, 32)
    registration.live = live
    own = {"role": role, "model": "m", "max_seq_len": 512}
    known, places = cast(Peers, others or Others(1)), cast(DynamoRegistration, registration)

    async def finish(seconds: float) -> int:
        registration.history.append(("finish", str(seconds)))
        return 3

    state = StageState(config, own, live, known, places, Trusting(), finish)
    return state, registration, live


async def test_a_worker_told_to_leave_answers_with_the_requests_that_it_gave_up() -> None:
    worker, registration, _ = stage_state("agg", "decode_first")
    assert await worker.handle_command({"command": "leave", "seconds": 9}) == {"requests_left": 3}
    assert registration.history == [("finish", "9.0")]
    with pytest.raises(InvalidRequestError, match="seconds"):
        await worker.handle_command({"command": "leave", "seconds": -1})


def switch_to(to: str) -> dict[str, str]:
    return {"command": "switch", "to": to}


@pytest.mark.parametrize(
    ("role", "strategy", "is_at_frontends"),
    [
        ("agg", "decode_first", True),
        ("prefill", "prefill_first", True),
        ("prefill", "decode_first", False),
        ("decode", "decode_first", True),
        ("decode", "auto", True),
        ("prefill", "auto", False),
        ("prefill", "router", True),
        ("decode", "router", True),
    ],
)
async def test_worker_registers_at_its_start_by_role_and_strategy(
    role: str, strategy: str, is_at_frontends: bool
) -> None:
    worker, registration, _ = stage_state(role, strategy)
    await worker.apply(strategy)
    assert registration.is_at_frontends is is_at_frontends


async def test_a_switch_of_workers_with_two_lengths_is_refused_by_name() -> None:
    """A frontend would send nothing to the new first stage: it has the context length of the old one."""
    coming, came, live = stage_state("prefill", "decode_first", Others(1, max_seq_len=1024))
    with pytest.raises(
        InvalidRequestError, match=r"'prefill_first' .*max_seq_len 512 .*1024 on the other role"
    ):
        await coming.handle_command(switch_to("prefill_first"))
    assert (came.history, live.strategy.value) == ([], "decode_first")


async def test_a_new_first_stage_runs_the_new_strategy_first_and_the_old_one_its_own_to_the_end() -> None:
    coming, came, _ = stage_state("prefill", "decode_first")
    leaving, left, _ = stage_state("decode", "decode_first")
    await leaving.apply("decode_first")

    assert (await coming.handle_command(switch_to("prefill_first")))["registered"] is True
    assert (await leaving.handle_command(switch_to("prefill_first")))["registered"] is False

    assert came.history == [("enter", "prefill_first")]
    assert left.history == [("enter", "decode_first"), ("leave", "decode_first")]
    assert coming.describe()["strategy"] == leaving.describe()["strategy"] == "prefill_first"


@pytest.mark.parametrize("at_start", [False, True])
async def test_switch_of_a_worker_that_stays_first_keeps_its_registration(at_start: bool) -> None:
    """A command that comes during the start wins over the strategy of the start."""
    worker, registration, live = stage_state("decode", "decode_first")
    if not at_start:
        await worker.apply("decode_first")
    await worker.handle_command(switch_to("auto"))
    if at_start:
        await worker.apply("prefill_first")
    assert registration.is_at_frontends
    assert live.strategy.value == "auto"


@pytest.mark.parametrize(("role", "is_at_frontends"), [("prefill", True), ("decode", False)])
async def test_worker_started_in_a_switched_deployment_takes_the_new_strategy(
    role: str, is_at_frontends: bool
) -> None:
    worker, registration, live = stage_state(role, "decode_first")
    assert worker.describe()["was_switched"] is False
    await worker.apply("prefill_first")
    assert (registration.is_at_frontends, live.strategy.value) == (is_at_frontends, "prefill_first")
    assert worker.describe()["was_switched"] is True


async def test_without_the_other_role_a_switch_to_first_stage_is_refused() -> None:
    worker, registration, live = stage_state("prefill", "decode_first", Others())
    with pytest.raises(PeerUnavailableError, match=r"dyn://dynamo\.backend\.generate"):
        await worker.handle_command(switch_to("prefill_first"))
    assert (live.strategy.value, registration.history) == ("decode_first", [])


@pytest.mark.parametrize("stand_by_error", [None, OSError("no discovery")])
async def test_a_registration_that_fails_leaves_the_old_order_and_the_place_at_peers(
    stand_by_error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    worker, registration, live = stage_state("prefill", "decode_first")
    registration.error, registration.stand_by_error = ConfigError("no card"), stand_by_error
    with pytest.raises(ConfigError, match="no card"):
        await worker.handle_command(switch_to("prefill_first"))
    assert live.strategy.value == "decode_first"
    assert registration.is_at_peers is (stand_by_error is None)
    assert ("no discovery" in caplog.text) is (stand_by_error is not None)


@pytest.mark.parametrize(("role", "strategy"), [("agg", "decode_first"), ("decode", "router")])
async def test_a_worker_of_agg_or_router_refuses_every_switch(role: str, strategy: str) -> None:
    worker, registration, _ = stage_state(role, strategy)
    with pytest.raises(InvalidRequestError, match="runs nothing else"):
        await worker.handle_command(switch_to("prefill_first"))
    assert registration.history == []
    with pytest.raises(ConfigError, match="where no worker calls another"):
        await worker.handle_command({"command": "set", "values": {"max_local_prefill_length": 7}})


@pytest.mark.parametrize(
    ("role", "settings", "fixed_by"),
    [
        ("decode", {}, []),
        ("prefill", {}, []),
        ("decode", {"endpoint": "dyn://dynamo.tensorrt_llm.generate"}, []),
        ("decode", {"next_endpoint": "dyn://dynamo.prefill.generate"}, []),
        ("decode", {"endpoint": "dyn://dynamo.mine.generate"}, ["--endpoint dyn://dynamo.mine.generate"]),
        ("prefill", {"endpoint": "dyn://dynamo.mine.generate"}, ["--endpoint dyn://dynamo.mine.generate"]),
        ("decode", {"next_endpoint": "dyn://a.b.c"}, ["--next-endpoint dyn://a.b.c"]),
    ],
)
async def test_a_worker_with_an_endpoint_of_its_own_is_not_switched(
    role: str, settings: dict[str, Any], fixed_by: list[str]
) -> None:
    """Frontends and the other role look for a switched worker at the usual ones."""
    worker, registration, live = stage_state(role, "decode_first", **settings)
    assert worker.describe()["fixed_by"] == fixed_by
    if fixed_by:
        with pytest.raises(InvalidRequestError, match=f"{fixed_by[0]}; expected the usual endpoints"):
            await worker.handle_command(switch_to("prefill_first"))
        assert (live.strategy.value, registration.history) == ("decode_first", [])


async def test_concurrent_switch_commands_run_one_after_the_other() -> None:
    worker, registration, live = stage_state("prefill", "decode_first")
    orders = ("prefill_first", "decode_first", "prefill_first")
    await asyncio.gather(*(worker.handle_command(switch_to(to)) for to in orders))
    assert [word for word, _ in registration.history] == ["enter", "leave", "enter"]
    assert live.strategy.value == "prefill_first"


async def test_switch_completes_when_its_caller_disconnects() -> None:
    worker, registration, _ = stage_state("prefill", "decode_first")
    asking = asyncio.create_task(worker.handle_command(switch_to("prefill_first")))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: registration.is_at_frontends)


@pytest.mark.parametrize(
    ("role", "good", "bad"),
    [
        ("decode", "max_local_prefill_length", {"max_local_prefill_length": 9, "no_such": 1}),
        ("decode", "max_local_prefill_length", {"max_prefill_queue_size": -1}),
        ("agg", "max_queued_requests", {"max_queued_requests": 8, "eff_isl_threshold": 1}),
    ],
)
async def test_thresholds_are_set_together_or_not_at_all(role: str, good: str, bad: dict[str, int]) -> None:
    worker, _, live = stage_state(role, "decode_first")
    answer = await worker.handle_command({"command": "set", "values": {good: 7}})
    assert answer["changed"][0].endswith("-> 7")
    with pytest.raises(ConfigError, match=list(bad)[-1]):
        await worker.handle_command({"command": "set", "values": bad})
    assert live.thresholds.value[good] == 7


async def test_only_whole_requests_of_frontends_are_counted() -> None:
    worker, _, _ = stage_state("decode", "decode_first")

    async def one_token(request: GenerateRequest, context: Any) -> Any:
        yield TokenChunk([1])

    counts = replace(counts_of(), whole_requests=worker.whole_requests)
    generate = trying(one_token, counts=counts)
    errand = PhaseRequest("whole")
    async with aclosing(generate(request(), FakeContext())) as mine:
        await anext(mine)
        async with aclosing(generate(request(errand={"stage": errand.kind}), FakeContext())) as others:
            await anext(others)
            assert worker.describe()["whole_requests"] == 1
    assert worker.describe()["whole_requests"] == 0


async def test_a_worker_that_was_switched_back_still_says_that_it_was_switched() -> None:
    """One that started in between has the strategy from before the switch back, and compares itself with this one."""
    worker, _, live = stage_state("prefill", "decode_first")
    await worker.apply("decode_first")
    await worker.handle_command(switch_to("decode_first"))
    assert worker.describe()["was_switched"] is False
    await worker.handle_command(switch_to("prefill_first"))
    await worker.handle_command(switch_to("decode_first"))
    assert (live.strategy.value, worker.describe()["was_switched"]) == ("decode_first", True)
