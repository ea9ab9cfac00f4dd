"""The checks of a start: one name, one model, and a pair that fits, also of workers that start together."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.worker.test_pairing import described
from trtllm_disagg.admin.commands import DescribedInstance
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.pairing import ModelIdentity
from trtllm_disagg.worker.startup_checks import NUM_MACHINE_IDS, ModelNameGuard, StartupChecks

MINE = ModelIdentity(model="tiny", source="/models/a", weights="aaaa")
PLACE = "dyn://dynamo.tensorrt_llm.generate"


def said(identity: ModelIdentity, **more: Any) -> dict[str, Any]:
    return {"role": "agg", **asdict(identity), **more}


def guard_of(*seen: DescribedInstance, mine: ModelIdentity = MINE) -> ModelNameGuard:
    async def look() -> list[DescribedInstance]:
        return list(seen)

    return ModelNameGuard(mine, 5, {PLACE}, look, poll_seconds=0, visible_seconds=0)


def guard(*others: dict[str, Any]) -> ModelNameGuard:
    itself = {"role": "agg", "model": MINE.model, "weights": "of no interest"}
    return guard_of(*(DescribedInstance(PLACE, 5 + i, each) for i, each in enumerate([itself, {}, *others])))


@pytest.mark.parametrize(
    "other",
    [{}, {"token_ids": []}, {"model": "tiny"}, said(MINE), said(replace(MINE, source="/copies/of/a"))],
)
async def test_workers_of_other_names_or_roles_are_not_compared(other: dict[str, Any]) -> None:
    await guard(other).require_same()
    await guard(other).confirm()


async def test_prefill_and_decode_may_hold_one_model_in_two_precisions() -> None:
    fp4 = replace(MINE, weights="bbbb", layout="same", precision="nvfp4", role="prefill")
    fp8 = replace(fp4, weights="cccc", precision="fp8", role="decode")

    def between(mine: ModelIdentity, other: ModelIdentity) -> ModelNameGuard:
        return guard_of(DescribedInstance(PLACE, 9, asdict(other)), mine=mine)

    await between(fp4, fp8).require_same()
    with pytest.raises(ConfigError, match="hash cccc"):
        await between(fp4, replace(fp8, role="prefill")).require_same()


async def test_workers_that_only_workers_call_share_no_endpoint_with_others() -> None:
    """A frontend that goes round the endpoint would send them requests."""

    def beside(mine: ModelIdentity, other: dict[str, Any], place: str = PLACE) -> ModelNameGuard:
        return guard_of(DescribedInstance(place, 7, other), mine=mine)

    decode = replace(MINE, role="decode", is_run_by_workers=True)
    called = said(decode, strategy="decode_first")
    with pytest.raises(ConfigError, match=r"--namespace: decode 7 at .* under decode_first"):
        await beside(MINE, called).require_same()
    with pytest.raises(ConfigError, match="--namespace: agg 7"):
        await beside(decode, said(MINE, strategy="agg")).require_same()
    await beside(MINE, called, "dyn://dynamo.elsewhere.generate").require_same()
    await beside(decode, called).require_same()
    older = {key: value for key, value in called.items() if key != "is_run_by_workers"}
    await beside(MINE, older).require_same()
    with pytest.raises(ConfigError, match="under decode_first"):
        await beside(MINE, older | {"is_worker_side": True}).require_same()  # of 0.2


async def test_empty_discovery_is_looked_at_once_more() -> None:
    """Discovery may not have told anything yet."""
    looks = iter([[], [DescribedInstance(PLACE, 7, said(replace(MINE, weights="bbbb")))]])

    async def look() -> list[DescribedInstance]:
        return next(looks)

    with pytest.raises(ConfigError, match="that agg 7 at"):
        await ModelNameGuard(MINE, 5, {PLACE}, look, poll_seconds=0).require_same()


async def test_worker_is_refused_when_a_settled_one_has_another_model() -> None:
    other = replace(MINE, weights="bbbb")
    mine = guard(said(other, settled=True))
    with pytest.raises(ConfigError, match="hash bbbb"):
        await mine.confirm()
    assert mine.described()["settled"] is False


async def test_a_conflict_that_lasts_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    other = DescribedInstance(PLACE, 9, said(replace(MINE, weights="bbbb"), settled=False))
    listed = iter([[other], [other], [other], []])

    async def look() -> list[DescribedInstance]:
        await asyncio.sleep(0.001)
        return next(listed)

    await ModelNameGuard(MINE, 5, {PLACE}, look, poll_seconds=0, visible_seconds=0).confirm()
    assert caplog.text.count("waiting for a worker to end") == 1
    assert "hash bbbb" in caplog.text


class Place:
    """Where workers that start together list themselves, look, and leave when they are refused. Whatever takes time
    takes as many turns of the loop as `chance` says.
    """

    def __init__(self, chance: random.Random, num_ids: int = NUM_MACHINE_IDS) -> None:
        self._chance = chance
        self.num_ids = num_ids
        self.there: dict[int, ModelNameGuard] = {}

    async def pause(self) -> None:
        for _ in range(self._chance.randrange(8)):
            await asyncio.sleep(0)

    async def start(self, instance_id: int, identity: ModelIdentity) -> bool:
        """Whether it serves."""

        async def look() -> list[DescribedInstance]:
            snapshot = list(self.there.items())
            await self.pause()
            answers = []
            for i, other in snapshot:
                await self.pause()
                if i in self.there:
                    answers.append(DescribedInstance(PLACE, i, {"role": "agg", **other.described()}))
            return answers

        mine = ModelNameGuard(identity, instance_id, {PLACE}, look, self.num_ids, poll_seconds=0.0)
        try:
            await self.pause()
            await mine.require_same()
            await self.pause()
            self.there[instance_id] = mine
            await self.pause()
            await mine.confirm()
        except ConfigError:
            await self.pause()
            self.there.pop(instance_id, None)
            return False
        return True


MODELS = (MINE, replace(MINE, weights="bbbb"), replace(MINE, model="another"))


@given(seed=st.integers(0, 2**32), models=st.lists(st.sampled_from(MODELS), min_size=2, max_size=5))
@settings(deadline=None, max_examples=150)
def test_workers_of_two_models_that_start_together_leave_one_model(
    seed: int, models: list[ModelIdentity]
) -> None:
    async def run() -> list[bool]:
        place = Place(random.Random(seed))
        starts = (place.start(i, each) for i, each in enumerate(models))
        async with asyncio.timeout(10):
            return await asyncio.gather(*starts)

    serves = asyncio.run(run())
    assert len({each for each, stays in zip(models, serves, strict=True) if stays}) == 1


# -- machine ids


@given(
    seed=st.integers(0, 2**32),
    ids=st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True),
    num_ids=st.integers(8, 12),
)
@settings(deadline=None, max_examples=150)
def test_workers_that_start_together_have_a_machine_id_each(seed: int, ids: list[int], num_ids: int) -> None:
    place = Place(random.Random(seed), num_ids)

    async def run() -> list[bool]:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(place.start(i, MINE) for i in ids))

    assert all(asyncio.run(run()))
    claimed = [each.machine_id for each in place.there.values()]
    assert len({*claimed}) == len(ids)
    assert set(claimed) <= set(range(num_ids))


def with_machine_id(machine_id: int, instance_id: int, *, settled: bool = True) -> DescribedInstance:
    return DescribedInstance(PLACE, instance_id, said(MINE, settled=settled, machine_id=machine_id))


@pytest.mark.parametrize(
    ("other", "claimed"),
    [
        pytest.param(with_machine_id(5, 9), 6, id="a settled worker keeps its id"),
        pytest.param(with_machine_id(5, 3, settled=False), 6, id="the lower instance id keeps it"),
        pytest.param(with_machine_id(5, 9, settled=False), 5, id="this one is the lower"),
        pytest.param(DescribedInstance(PLACE, 5 + 1021, said(MINE)), 6, id="of a version that says none"),
        pytest.param(DescribedInstance(PLACE, 7, {"machine_id": "5"}), 5, id="of another program"),
    ],
)
async def test_of_two_workers_with_one_machine_id_one_takes_another(
    other: DescribedInstance, claimed: int
) -> None:
    mine = guard_of(other)
    await mine.confirm()
    assert mine.described()["machine_id"] == mine.machine_id == claimed


async def test_a_worker_that_enters_again_keeps_its_machine_id_unless_it_is_taken() -> None:
    for other, claimed in ((with_machine_id(8, 9), 700), (with_machine_id(700, 9), 701)):
        mine = guard_of(other)
        mine.machine_id = 700
        await mine.require_same()
        assert mine.machine_id == claimed


async def test_workers_beyond_the_number_of_machine_ids_share_one_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def look() -> list[DescribedInstance]:
        return [with_machine_id(each, 90 + each) for each in range(3)]

    mine = ModelNameGuard(MINE, 5, {PLACE}, look, 3, poll_seconds=0, visible_seconds=0)
    await mine.require_same()
    await mine.confirm()
    assert mine.machine_id == 2
    assert caplog.text.count("another worker also has the machine id 2: only 3 exist") == 1


# -- two workers that do not fit together, and start at the same time


BACKEND = "dyn://dynamo.backend.generate"
CONFIG = WorkerConfig(model="org/model", engine="embedded", role=Role.DECODE)
IDENTITY = ModelIdentity("org/model", "org/model", "ab", role="decode")


class LateDirectory:
    """The watch at the other role's endpoint that has not heard of the newest worker yet."""

    async def wait_for_second_stage(self, endpoint_id: str) -> None:
        raise AssertionError(f"a second stage at {endpoint_id}")

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        return []


class Directory(LateDirectory):
    """Workers of the other role."""

    def __init__(self, *peers: dict[str, Any]) -> None:
        self._peers = list(peers)

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        return self._peers


class DeadFirst(LateDirectory):
    """Discovery lists a dead instance, which never sends its description, and later a live one."""

    def __init__(self, live: dict[str, Any]) -> None:
        self._answers = [[], [], [live]]

    async def wait_for_second_stage(self, endpoint_id: str) -> None:
        """One is listed, alive or dead."""

    async def peer_descriptions(self, endpoint_id: str) -> list[dict[str, Any]]:
        return self._answers.pop(0)


def starting(
    *others: dict[str, Any], late: bool = False, **settings: Any
) -> tuple[StartupChecks, dict[str, Any]]:
    """A decode worker under decode_first that is seen with these, and its description."""
    own = described("decode", **settings)

    async def look() -> list[DescribedInstance]:
        return [DescribedInstance(BACKEND, 5 + i, each) for i, each in enumerate([own, *others])]

    directory = LateDirectory() if late else Directory(*others)
    checks = StartupChecks(
        replace(CONFIG, **settings), ModelNameGuard(IDENTITY, 5, {BACKEND}, look), directory
    )
    return checks, own


async def test_a_peer_that_is_listed_with_this_worker_is_compared_though_its_watch_is_late() -> None:
    starts, own = starting(described("prefill", block_size=64), late=True)
    with pytest.raises(ConfigError, match="tokens_per_block"):
        await starts.before_registering(own)


async def test_workers_of_the_own_role_are_not_compared() -> None:
    others = (described("prefill"), described("decode", block_size=64))
    starts, own = starting(*others, late=True)
    await starts.before_registering(own)


SWITCHED = described("prefill", strategy="decode_first") | {"strategy": "prefill_first", "was_switched": True}
SWITCHED_BACK = described("prefill", strategy="decode_first") | {"was_switched": True}
#: Started after the switch, by an `up` that has heard of it.
STARTED_SO = described("prefill", strategy="prefill_first")


@pytest.mark.parametrize(
    ("peers", "own_strategy", "runs"),
    [
        pytest.param([SWITCHED], "decode_first", "prefill_first", id="switched"),
        pytest.param([STARTED_SO, SWITCHED], "decode_first", "prefill_first", id="one switched"),
        pytest.param([SWITCHED_BACK], "prefill_first", "decode_first", id="there and back"),
        # Until it is commanded.
        pytest.param([SWITCHED, described("prefill")], "decode_first", "decode_first", id="during a switch"),
    ],
)
async def test_a_worker_runs_what_the_others_were_switched_to_while_it_loaded(
    peers: list[dict[str, Any]], own_strategy: str, runs: str
) -> None:
    starts, own = starting(*peers, strategy=own_strategy)
    await starts.before_listing(own)
    assert await starts.before_registering(own) == runs


ELSEWHERE = {"next_endpoint": "dyn://dynamo.elsewhere.generate"}


@pytest.mark.parametrize(
    ("peer", "settings", "named"),
    [
        pytest.param(STARTED_SO, {}, "--disaggregation-strategy", id="not switched"),
        pytest.param(SWITCHED, ELSEWHERE, "--disaggregation-strategy", id="an endpoint of its own"),
        pytest.param(SWITCHED | {"block_size": 64}, {}, "tokens_per_block", id="another block size"),
    ],
)
async def test_a_difference_that_a_switch_does_not_explain_is_refused(
    peer: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    starts, own = starting(peer, **settings)
    with pytest.raises(ConfigError, match=named):
        await starts.before_listing(own)


def waiting_for(directory: DeadFirst) -> StartupChecks:
    """A first stage that serves with a second one only."""

    async def look() -> list[DescribedInstance]:
        return []

    config = replace(CONFIG, strategy="decode_first", on_missing_stage="fail")
    return StartupChecks(config, ModelNameGuard(IDENTITY, 5, {BACKEND}, look), directory)


async def test_first_stage_waits_for_a_second_one_that_answers() -> None:
    await waiting_for(DeadFirst(described("prefill"))).before_listing(described("decode"))
    with pytest.raises(ConfigError, match="tokens_per_block"):
        await waiting_for(DeadFirst(described("prefill", block_size=64))).before_listing(described("decode"))
