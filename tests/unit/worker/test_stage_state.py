"""A worker that changes its place while it serves, by a command: in which order, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.handling import request, until
from tests.support.stage_client import FakeContext
from tests.support.trying import counts_of, trying
from trtllm_disagg.admin.commands import CONTROL, Command, Verifier, decode_command
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import DESCRIBE
from trtllm_disagg.dynamo_runtime.registration import Place, Registration
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.errors import ConfigError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.strategies import disaggregated
from trtllm_disagg.types import GenerateRequest, PhaseRequest, TokenChunk
from trtllm_disagg.worker.control import Control
from trtllm_disagg.worker.life import Event, Life, State
from trtllm_disagg.worker.stage_state import StageState
from trtllm_disagg.worker.worker import RoleTerm


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

    @property
    def place(self) -> Place:
        return Place.FRONTENDS if self.is_at_frontends else Place.PEERS if self.is_at_peers else Place.NONE

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


class FinishesAtOnce:
    """In place of `Leaving`."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    async def finish(self, seconds: float, *, others_stay: bool = False) -> int:
        self.seconds = seconds
        return 3


@dataclass
class Serving:
    """A worker that serves, and what it does on commands."""

    control: Control
    stage: StageState
    life: Life
    leaving: FinishesAtOnce

    async def handle_command(self, raw: Any) -> dict[str, Any]:
        return await self.control.handle(raw)

    async def apply(self, strategy: str) -> None:
        await self.stage.apply(strategy)

    def describe(self) -> dict[str, Any]:
        return self.stage.describe()


def serving_life() -> Life:
    life = Life()
    life.happened(Event.LOADED)
    life.happened(Event.PAIRED)
    return life


def stage_state(
    role: str,
    strategy: str,
    others: Others | None = None,
    listed: Sequence[dict[str, Any]] = (),
    **settings: Any,
) -> tuple[Serving, FakeRegistration, LiveState]:
    """`listed`: the descriptions of all workers, this one's first."""
    config = WorkerConfig(model="m", role=Role(role), strategy=strategy, **settings)
    registration, live, life = FakeRegistration(), LiveState.of(config, 32), serving_life()
    registration.live = live
    own = listed[0] if listed else {"role": role, "model": "m"}
    known, places = cast(Peers, others or Others(1)), cast(Registration, registration)

    async def list_others() -> Sequence[dict[str, Any]]:
        return listed[1:]

    stage, leaving = StageState(config, life, live, known, places, 512), FinishesAtOnce()
    term = SimpleNamespace(
        config=config,
        instance="7",
        process=SimpleNamespace(life=life, engine_args={}),
        stage=stage,
        leaving=leaving,
        describe=lambda: own | stage.describe(),
        others=list_others,
    )
    control = Control(cast(RoleTerm, term), Trusting())
    return Serving(control, stage, life, leaving), registration, live


async def test_a_worker_told_to_leave_answers_with_the_requests_that_it_gave_up() -> None:
    worker, _, _ = stage_state("agg", "decode_first")
    assert await worker.handle_command({"command": "leave", "seconds": 9}) == {"requests_left": 3}
    assert worker.leaving.seconds == 9
    with pytest.raises(InvalidRequestError, match="seconds"):
        await worker.handle_command({"command": "leave", "seconds": -1})


def flip_to(to: str, **more: Any) -> dict[str, Any]:
    return {"command": "flip", "to": to} | more


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


async def test_flip_to_a_decode_worker_that_would_mix_up_images_is_refused() -> None:
    """The engine reuses blocks (`config/image_checks.py`)."""
    worker, _, _ = stage_state("prefill", "decode_first", engine="tensorrt_llm", enable_multimodal=True)
    with pytest.raises(ConfigError, match=r"^kv_cache_config.enable_block_reuse: True "):
        await worker.handle_command(flip_to("decode", force=True))
    assert worker.life.becomes is None


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


async def test_only_whole_requests_of_frontends_are_counted() -> None:
    worker, _, _ = stage_state("decode", "decode_first")

    async def one_token(request: GenerateRequest, context: Any) -> Any:
        yield TokenChunk([1])

    counts = replace(counts_of(), client_requests=worker.stage.client_requests)
    generate = trying(one_token, counts=counts)
    phase_request = PhaseRequest("whole")
    async with aclosing(generate(request(), FakeContext())) as mine:
        await anext(mine)
        async with aclosing(
            generate(request(phase_request={"phase": phase_request.phase}), FakeContext())
        ) as others:
            await anext(others)
            assert worker.describe()["client_requests"] == 1
    assert worker.describe()["client_requests"] == 0


async def test_a_worker_that_was_switched_back_still_says_that_it_was_switched() -> None:
    """One that started in between has the strategy from before the switch back, and compares itself with this one."""
    worker, _, live = stage_state("prefill", "decode_first")
    await worker.apply("decode_first")
    await worker.handle_command(switch_to("decode_first"))
    assert worker.describe()["was_switched"] is False
    await worker.handle_command(switch_to("prefill_first"))
    await worker.handle_command(switch_to("decode_first"))
    assert (live.strategy.value, worker.describe()["was_switched"]) == ("decode_first", True)


async def test_a_worker_describes_what_waits_on_it() -> None:
    worker, _, live = stage_state("decode", "decode_first")
    leave = live.queued.enter(700)
    assert [worker.describe()[key] for key in ("queued_requests", "queued_tokens")] == [1, 700]
    leave()
    assert worker.describe()["queued_requests"] == 0


# -- at the system port


async def test_a_worker_describes_itself_at_its_system_port_and_takes_the_same_commands() -> None:
    worker, registration, _ = stage_state("prefill", "decode_first")
    told = await worker.control.at_system_port({})
    assert told == await worker.control.at_system_port({DESCRIBE: True})
    assert told.items() >= {"instance": "7", "role": "prefill", "registered": False}.items()
    answer = await worker.control.at_system_port({CONTROL: switch_to("prefill_first")})
    assert answer["answer"]["registered"] is True
    assert registration.history == [("enter", "prefill_first")]


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        (
            {"tokens": [1]},
            "InvalidRequest",
            "expected {}, {'trtllm_disagg.describe': true} or a signed command in",
        ),
        ({DESCRIBE: False}, "InvalidRequest", "is not allowed"),
        ([1], "InvalidRequest", r"[1] is not allowed"),
        ({CONTROL: {"command": "stop"}}, "InvalidRequest", "expected a command of switch, set"),
        ({CONTROL: flip_to("decode")}, "InvalidRequest", "the other role"),
        ({CONTROL: switch_to("decode_first")}, "Unavailable", "no worker of the other role"),
    ],
)
async def test_what_a_worker_refuses_at_its_system_port_is_an_error_with_its_name(
    body: Any, code: str, named: str
) -> None:
    worker, registration, _ = stage_state("decode", "prefill_first", Others())
    error = (await worker.control.at_system_port(body))["error"]
    assert error["code"] == code
    assert named in error["message"]
    assert registration.history == []


async def test_a_worker_that_is_not_listed_yet_takes_no_command() -> None:
    worker, _, _ = stage_state("decode", "decode_first")
    worker.control.term.leaving = None
    error = (await worker.control.at_system_port({CONTROL: switch_to("auto")}))["error"]
    assert (error["code"], "takes commands later" in error["message"]) == ("Unavailable", True)


# -- a worker that flips


#: How a worker of these tests describes itself, but for its role.
ENGINE: dict[str, Any] = {
    "model": "m",
    "weights": "w",
    "strategy": "prefill_first",
    "max_seq_len": 512,
    "longest_step": None,
    "has_guides": True,
    "max_batch_size": 64,
    "max_num_tokens": 512,
    "overlap_scheduler": True,
    "context_parallel_size": 1,
    "trtllm_version": "1.3.0rc29",
}


def flips(
    role: str = "prefill",
    strategy: str = "prefill_first",
    own: dict[str, Any] | None = None,
    alike: dict[str, Any] | None = None,
    peer: dict[str, Any] | None = None,
    **settings: Any,
) -> Serving:
    """A worker that describes itself with `own`, beside one of the other role with `alike`, and one of its role with
    `peer`, which may be missing (None).
    """
    other = "decode" if role == "prefill" else "prefill"
    engine = ENGINE | {"strategy": strategy}
    listed = [engine | {"role": role} | (own or {}), engine | {"role": other} | (alike or {})]
    listed += [engine | {"role": role} | peer] if peer is not None else []
    return stage_state(role, strategy, listed=listed, **settings)[0]


SMALL = (
    "max_num_tokens: 8 (expected at least 256): another decode worker has 512, and this one does less at once"
)


@pytest.mark.parametrize(
    ("to", "setting", "more", "warnings"),
    [
        *(("decode", {"strategy": name, "peer": {}}, {}, []) for name in disaggregated()),
        *(("prefill", {"role": "decode", "strategy": name, "peer": {}}, {}, []) for name in disaggregated()),
        ("decode", {}, {"force": True}, []),
        ("decode", {"own": {"longest_step": 256}, "peer": {}}, {}, []),
        ("decode", {"own": {"max_num_tokens": 8}, "peer": {}}, {}, [SMALL]),
    ],
)
async def test_a_worker_that_fits_begins_its_flip_and_says_what_will_be_slow(
    to: str, setting: dict[str, Any], more: dict[str, Any], warnings: list[str]
) -> None:
    worker = flips(**setting)
    assert await worker.handle_command(flip_to(to, **more)) == {"warnings": warnings}
    assert (worker.life.state, worker.life.becomes) == (State.UNLISTED, to)


DECODES: dict[str, Any] = {"role": "decode", "peer": {}}
OLD = {"trtllm_version": "1.3.0rc21"}
ELSEWHERE = "dyn://dynamo.mine.generate"


@pytest.mark.parametrize(
    ("to", "setting", "named"),
    [
        ("prefill", {}, "the other role: this worker is a prefill worker"),
        ("decode", {"role": "agg"}, "a worker of mode agg runs both phases"),
        ("decode", {"endpoint": ELSEWHERE}, f"with --endpoint {ELSEWHERE}"),
        ("decode", {"endpoint": ELSEWHERE, "strategy": "router"}, "with --endpoint"),
        ("decode", {"next_endpoint": ELSEWHERE}, "with --next-endpoint"),
        ("decode", {}, r"it is the last prefill worker \(--force\)"),
        ("decode", {"alike": {"max_seq_len": 1024}, "peer": {}}, "max_seq_len 1024; here it is 512"),
        ("decode", {"own": {"has_guides": False}, "peer": {}}, "guided_decoding_backend is not set here"),
        (
            "decode",
            {"alike": {"weights": "v", "source": "x"}, "peer": {}},
            "model of the other decode workers, x",
        ),
        ("decode", {"peer": {"kv_dtype": "fp8"}}, "kv_cache_config.dtype"),
        ("prefill", DECODES | {"own": {"longest_step": 256}}, "longer prompts; max_num_tokens is 256"),
        ("prefill", DECODES | {"own": {"context_parallel_size": 2}}, "context_parallel_size: 1"),
        ("prefill", DECODES | {"own": OLD, "peer": OLD}, "disable_overlap_scheduler: true"),
    ],
)
async def test_a_flip_that_would_fail_or_be_wrong_is_refused_by_name(
    to: str, setting: dict[str, Any], named: str
) -> None:
    worker = flips(**setting)
    with pytest.raises((InvalidRequestError, ConfigError), match=named):
        await worker.handle_command(flip_to(to))
    assert (worker.life.state, worker.life.becomes) == (State.SERVING, None)
