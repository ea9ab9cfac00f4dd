"""`reconcile`: single looks, and thousands of random histories of deaths, late arrivals and wishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_disagg.strategies import STRATEGIES, spec_of, switchable
from trtllm_disagg.tools.up.reconcile import (
    Adopt,
    Flip,
    Phase,
    Seen,
    Start,
    Step,
    Stop,
    Switch,
    Wanted,
    Withdraw,
    reconcile,
    takes_requests,
)

ONE_EACH = {"prefill": 1, "decode": 1}


def worker(
    name: str, phase: Phase = Phase.SERVING, strategy: str = "decode_first", **changes: object
) -> Seen:
    role = str(changes.pop("role", name.partition("-")[0]))
    is_first = takes_requests(role, strategy) and phase is Phase.SERVING
    seen = Seen(name, role, phase, strategy, is_registered=is_first, answers=is_first)
    return replace(seen, **changes)  # type: ignore[arg-type]


PAIR = (worker("prefill-0"), worker("decode-0"))


# -- single looks


def test_missing_workers_start_before_others_leave() -> None:
    wanted = Wanted("decode_first", workers={"prefill": 2, "decode": 1})
    seen = (*PAIR, worker("decode-1"))
    assert reconcile(wanted, seen) == [Start("prefill", "")]
    assert reconcile(wanted, (*seen, worker("prefill-1", Phase.STARTING))) == []
    assert reconcile(wanted, (*seen, worker("prefill-1"))) == [Stop("decode-1")]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.STARTING, Phase.GIVEN_UP])
def test_a_worker_that_does_not_serve_leaves_before_a_younger_one_that_does(phase: Phase) -> None:
    seen = (worker("prefill-0"), worker("decode-0", phase), worker("decode-1"))
    assert reconcile(Wanted("decode_first", workers=ONE_EACH), seen) == [Stop("decode-0")]


def test_a_worker_that_was_given_up_keeps_its_place() -> None:
    seen = (worker("prefill-0"), worker("decode-0", Phase.GIVEN_UP))
    assert reconcile(Wanted("decode_first", workers=ONE_EACH), seen) == []


def test_the_only_first_stage_flips_when_forced_and_else_waits_for_another_one() -> None:
    wanted = Wanted("decode_first", workers={"prefill": 2, "decode": 1}, roles={"decode-0": "prefill"})
    alone = (*PAIR, worker("decode-1", Phase.STARTING))
    assert reconcile(wanted, alone) == []
    assert reconcile(wanted, (*PAIR, worker("decode-1"))) == [Flip("decode-0", "prefill")]
    forced = replace(wanted, forced=frozenset({"decode-0"}))
    assert reconcile(forced, alone) == [Flip("decode-0", "prefill", force=True)]


def test_a_flipping_worker_counts_in_the_role_that_it_gets() -> None:
    wanted = Wanted("decode_first", workers={"prefill": 2, "decode": 1}, roles={"decode-1": "prefill"})
    flipping = worker("decode-1", Phase.LEAVING, becomes="prefill")
    assert reconcile(wanted, (*PAIR, flipping)) == []


def test_a_switch_begins_with_the_new_first_stage_and_ends_when_the_frontend_knows_it() -> None:
    wanted = Wanted("prefill_first", workers=ONE_EACH)
    assert reconcile(wanted, PAIR) == [Switch("prefill-0", "prefill_first")]
    new = worker("prefill-0", strategy="prefill_first", answers=False)
    assert reconcile(wanted, (new, PAIR[1])) == []
    assert reconcile(wanted, (replace(new, answers=True), PAIR[1])) == [Switch("decode-0", "prefill_first")]


def test_no_step_counts_on_a_first_stage_that_has_a_command_in_progress() -> None:
    """On its way to a second stage it describes itself as before, but may have removed its card."""
    leaving = worker("prefill-0", strategy="prefill_first", is_busy=True)
    assert reconcile(Wanted("prefill_first", workers=ONE_EACH), (leaving, PAIR[1])) == []
    flips = Wanted("decode_first", workers={"prefill": 2, "decode": 1}, roles={"decode-0": "prefill"})
    assert reconcile(flips, (*PAIR, worker("decode-1", is_busy=True))) == []


def test_a_new_revision_starts_its_second_stage_first_and_is_adopted_when_it_answers() -> None:
    wanted = Wanted("decode_first", workers=ONE_EACH, following="v2")
    assert reconcile(wanted, PAIR) == [Start("prefill", "v2")]
    prefill, decode = worker("prefill-1", revision="v2"), worker("decode-1", revision="v2")
    assert reconcile(wanted, (*PAIR, prefill)) == [Start("decode", "v2")]
    assert reconcile(wanted, (*PAIR, prefill, replace(decode, answers=False))) == []
    assert reconcile(wanted, (*PAIR, prefill, decode)) == [Adopt("v2")]


def test_a_new_revision_that_cannot_serve_is_withdrawn_and_its_workers_stop() -> None:
    wanted = Wanted("decode_first", workers=ONE_EACH, following="v2")
    broken = worker("prefill-1", Phase.WAITING, revision="v2", fault="no such model")
    assert reconcile(wanted, (*PAIR, broken)) == [Withdraw("v2", "no such model")]
    assert reconcile(replace(wanted, following=None), (*PAIR, broken)) == [Stop("prefill-1")]


def test_old_workers_leave_in_the_order_of_the_request_also_those_that_come_back_late() -> None:
    wanted = Wanted("decode_first", "v2", ONE_EACH, drain_seconds=9.0)
    new = tuple(replace(each, name=f"{each.role}-9", revision="v2") for each in PAIR)
    assert reconcile(wanted, (*PAIR, *new)) == [Stop("decode-0", 9.0)]
    assert reconcile(wanted, (PAIR[0], replace(PAIR[1], phase=Phase.LEAVING), *new)) == []
    assert reconcile(wanted, (PAIR[0], *new)) == [Stop("prefill-0", 9.0)]
    assert reconcile(wanted, (worker("decode-1", role="decode"), *new)) == [Stop("decode-1", 9.0)]


def test_old_workers_stay_while_the_current_revision_does_not_answer() -> None:
    wanted = Wanted("decode_first", "v2", ONE_EACH)
    new = (worker("prefill-9", revision="v2"), worker("decode-9", Phase.WAITING, revision="v2"))
    assert reconcile(wanted, (*PAIR, *new)) == []


def test_in_place_one_worker_at_a_time_gives_its_place_in_turns_of_the_roles() -> None:
    wanted = Wanted("decode_first", workers={"prefill": 2, "decode": 2}, following="v2", in_place=True)
    old = [worker(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    told: list[Step] = []
    for number in range(4):
        (stop,) = reconcile(wanted, old)
        assert isinstance(stop, Stop)
        gone = next(each for each in old if each.name == stop.name)
        assert (
            reconcile(wanted, [replace(each, phase=Phase.LEAVING) if each is gone else each for each in old])
            == []
        )
        old.remove(gone)
        assert reconcile(wanted, old) == [Start(gone.role, "v2")]
        old.append(worker(f"{gone.role}-{number + 2}", revision="v2"))
        told.append(stop)
    assert [step.name.partition("-")[0] for step in told if isinstance(step, Stop)] == [
        "prefill",
        "decode",
    ] * 2
    assert reconcile(wanted, old) == [Adopt("v2")]


def test_where_another_program_starts_workers_no_step_starts_or_stops_one_of_this_revision() -> None:
    assert reconcile(Wanted("decode_first"), (*PAIR, worker("decode-1", Phase.LEAVING))) == []
    rolling = Wanted("decode_first", following="v2")
    assert reconcile(rolling, PAIR) == []
    new = tuple(replace(each, name=f"{each.role}-9", revision="v2") for each in PAIR)
    assert reconcile(rolling, (*PAIR, new[1])) == []
    assert reconcile(rolling, (*PAIR, *new)) == [Adopt("v2")]


# -- histories


@dataclass
class World:
    """Workers that do what they are told after a while. `unlucky` revisions die at each start."""

    wanted: Wanted
    workers: dict[str, Seen] = field(default_factory=dict)
    unlucky: frozenset[str] = frozenset()
    num_started: int = 0
    has_died: bool = False

    def step(self) -> list[Step]:
        steps = reconcile(self.wanted, [*self.workers.values()])
        for each in steps:
            self.take(each)
        return steps

    def take(self, step: Step) -> None:
        match step:
            case Start(role, revision):
                name = f"{role}-{self.num_started}"
                self.num_started += 1
                self.workers[name] = Seen(name, role, Phase.STARTING, self.wanted.strategy, revision)
            case Stop(name):
                self.change(name, phase=Phase.LEAVING, becomes="", is_registered=False)
                if self.workers[name].fault or not self.workers[name].strategy:
                    del self.workers[name]
            case Flip(name, to):
                self.change(name, phase=Phase.LEAVING, becomes=to, is_registered=False)
            case Switch(name, to):
                role = self.workers[name].role
                first = takes_requests(role, to)
                same = first and self.workers[name].is_registered
                self.change(
                    name, strategy=to, is_registered=first, answers=same and self.workers[name].answers
                )
            case Adopt(revision):
                self.wanted = replace(self.wanted, revision=revision, following=None, in_place=False)
            case Withdraw():
                self.wanted = replace(self.wanted, following=None, in_place=False)

    def change(self, name: str, **changes: object) -> None:
        self.workers[name] = replace(self.workers[name], **changes)  # type: ignore[arg-type]

    def progress(self, name: str) -> None:
        """Something that this worker was about to do is done."""
        each = self.workers[name]
        match each.phase:
            case Phase.STARTING if each.revision in self.unlucky:
                self.change(name, phase=Phase.WAITING, fault="no such model")
            case Phase.STARTING:
                role = self.wanted.roles.get(name, each.role)
                first = takes_requests(role, each.strategy)
                self.change(name, phase=Phase.SERVING, role=role, is_registered=first, answers=False)
            case Phase.SERVING:
                self.change(name, answers=each.takes_requests)
            case Phase.LEAVING if each.becomes:
                self.change(name, phase=Phase.STARTING, role=each.becomes, becomes="")
            case Phase.LEAVING:
                del self.workers[name]
            case Phase.WAITING:
                self.change(name, phase=Phase.STARTING)
            case Phase.GIVEN_UP:
                pass

    def die(self, name: str) -> None:
        self.has_died = True
        was_told = self.workers[name].phase is Phase.LEAVING and not self.workers[name].becomes
        if was_told:
            del self.workers[name]
        else:
            self.change(name, phase=Phase.WAITING, is_registered=False, answers=False, becomes="")

    @property
    def firsts(self) -> int:
        return sum(each.is_first for each in self.workers.values())

    def is_as_wanted(self) -> bool:
        wanted, there = self.wanted, [*self.workers.values()]
        counts = {role: sum(each.role == role for each in there) for role in wanted.workers}
        return (
            wanted.following is None
            and counts == wanted.workers
            and all(each.phase is Phase.SERVING and each.revision == wanted.revision for each in there)
            and all(each.strategy == wanted.strategy for each in there)
            and all(each.is_first == takes_requests(each.role, wanted.strategy) for each in there)
            and all(wanted.role_of(each) == each.role for each in there)
        )


COUNTS = st.integers(1, 3)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    strategy = draw(st.sampled_from([*STRATEGIES]))
    workers: dict[str, int] = {role: draw(COUNTS) for role in spec_of(strategy).roles}
    return settled(World(Wanted(strategy, workers=workers)))


def settled(world: World) -> World:
    for _ in range(400):
        world.step()
        for name in [*world.workers]:
            world.progress(name)
        if world.is_as_wanted() and not world.step():
            return world
    raise AssertionError(f"never as wanted: {world}")


def new_wish(draw: Callable[[st.SearchStrategy[Any]], Any], world: World) -> None:
    wanted = world.wanted
    kind = draw(st.sampled_from(["scale", "switch", "flip", "rollout", "unlucky", "withdraw"]))
    if kind == "scale":
        wanted = replace(wanted, workers={role: draw(COUNTS) for role in wanted.workers})
    elif kind == "switch" and wanted.strategy in switchable():
        wanted = replace(wanted, strategy=draw(st.sampled_from(switchable())))
    elif kind == "flip":
        able = [
            each
            for each in world.workers.values()
            if wanted.workers.get(wanted.role_of(each), 0) > 1
            and each.lasts
            and each.revision == wanted.revision
        ]
        if able and "prefill" in wanted.workers:
            one = draw(st.sampled_from(able))
            was = wanted.role_of(one)
            to = "decode" if was == "prefill" else "prefill"
            counts = {**wanted.workers, was: wanted.workers[was] - 1, to: wanted.workers[to] + 1}
            wanted = replace(wanted, workers=counts, roles={**wanted.roles, one.name: to})
    elif kind in ("rollout", "unlucky") and wanted.following is None:
        name = f"v{world.num_started}"
        wanted = replace(wanted, following=name, in_place=draw(st.booleans()))
        if kind == "unlucky":
            world.unlucky |= {name}
    elif kind == "withdraw":
        wanted = replace(wanted, following=None, in_place=False)
    world.wanted = wanted


@settings(max_examples=400, deadline=None)
@given(world=worlds(), data=st.data())
def test_any_history_ends_as_wanted_and_no_step_takes_the_last_first_stage(
    world: World, data: st.DataObject
) -> None:
    for _ in range(data.draw(st.integers(1, 25))):
        event = data.draw(
            st.sampled_from(["step", "step", "progress", "progress", "progress", "wish", "die"])
        )
        if event == "wish":
            new_wish(data.draw, world)
        elif event == "step":
            before, is_in_place = world.firsts, world.wanted.in_place
            world.step()
            assert world.firsts >= min(before, 1) or is_in_place
        elif world.workers:
            name = data.draw(st.sampled_from(sorted(world.workers)))
            world.die(name) if event == "die" else world.progress(name)
    settled(world)


@settings(max_examples=300, deadline=None)
@given(world=worlds(), data=st.data())
def test_without_deaths_there_are_never_fewer_first_stages_than_before_or_wanted(
    world: World, data: st.DataObject
) -> None:
    before = world.firsts
    new_wish(data.draw, world)
    wanted = world.wanted
    firsts = (n for role, n in wanted.workers.items() if takes_requests(role, wanted.strategy))
    least, is_in_place = min(before, sum(firsts)), wanted.in_place
    for _ in range(300):
        steps = world.step()
        assert world.firsts >= least or is_in_place
        names = data.draw(st.lists(st.sampled_from(sorted(world.workers)), max_size=3))
        for name in names:
            if name in world.workers:
                world.progress(name)
        if not steps and world.is_as_wanted():
            return
        if not names:
            for name in [*world.workers]:
                world.progress(name)
    raise AssertionError(f"never as wanted: {world}")
