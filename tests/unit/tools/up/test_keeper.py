"""The workers of an `up` become as they are wanted, whatever happens meanwhile. Real processes, which are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.described_workers import SECONDS, Running, running
from trtllm_disagg.admin.commands import Flip, Set, Switch
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.errors import ConfigError, DisaggError, PeerUnavailableError, StageTimeoutError
from trtllm_disagg.tools.up import look, workers
from trtllm_disagg.tools.up.commands import Describe, Rollout, Scale
from trtllm_disagg.tools.up.reconcile import Phase


def kill(up: Running, name: str) -> None:
    os.kill(up.pid(name), signal.SIGKILL)


async def flip_for_long(up: Running, name: str, to: str, **options: bool) -> None:
    """Until `slow` is removed. Its command ends first."""
    (up.faults / "slow").touch()
    with pytest.raises(StageTimeoutError, match=r"not finished after 0\.3 s"):
        await up.tell(Flip(cast(Any, to), process=name), deadline=0.3, **options)


def as_wanted(up: Running) -> bool:
    wanted, seen = up.keeper.wanted, up.keeper.seen
    counts = {role: sum(each.role == role for each in seen) for role in wanted.workers}
    return counts == wanted.workers and all(
        (each.phase, each.strategy, each.revision) == (Phase.SERVING, wanted.strategy, wanted.revision)
        for each in seen
    )


async def test_a_scale_beside_a_flip_counts_the_worker_in_its_new_role(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        (up.faults / "slow").touch()
        flip = asyncio.create_task(up.tell(Flip("prefill", process="decode-0")))
        await up.until(lambda: up.keeper.wanted.roles)
        assert await up.tell(Scale({"decode": 1})) == {"prefill": 2, "decode": 1}
        (up.faults / "slow").unlink()
        outcome = await flip
        assert (outcome["role"], outcome["process"]) == ("prefill", "decode-0")
        assert up.roles() == {"prefill-0": "prefill", "decode-0": "prefill", "decode-1": "decode"}


async def test_a_flip_whose_command_ended_first_is_known_and_a_restart_keeps_the_role(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        await flip_for_long(up, "decode-0", "prefill")
        (up.faults / "slow").unlink()
        await up.until(lambda: up.roles()["decode-0"] == "prefill" and as_wanted(up))
        kill(up, "decode-0")
        await up.until(lambda: any("decode-0 is back" in line for line in up.said.lines))
        await up.until(lambda: as_wanted(up))
        assert up.roles()["decode-0"] == "prefill"


async def test_a_flip_that_a_worker_refuses_or_returns_from_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        before = up.keeper.wanted
        (up.faults / "refuse").touch()
        with pytest.raises(DisaggError, match="no flip here"):
            await up.tell(Flip("prefill", process="decode-0"))
        assert (up.keeper.wanted.workers, up.keeper.wanted.roles) == (before.workers, {})
        (up.faults / "refuse").unlink()
        (up.faults / "back").touch()
        with pytest.raises(DisaggError, match="decode-0 could not become prefill, and is decode again"):
            await up.tell(Flip("prefill", process="decode-0"))
        assert (up.keeper.wanted.workers, up.keeper.wanted.roles) == (before.workers, {})
        with pytest.raises(DisaggError, match="it is the last prefill worker"):
            await up.tell(Flip("decode", process="prefill-0"))
        with pytest.raises(
            ConfigError, match=r"--instance: 'prefill-7' is not allowed; expected one of prefill-0 "
        ):
            await up.tell(Flip("decode", process="prefill-7"))


async def test_a_switch_reaches_a_worker_that_comes_late_and_is_told_by_describe(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        kill(up, "decode-1")
        outcome = await up.tell(Switch("prefill_first"))
        assert (outcome["strategy"], outcome["requests_left"]) == ("prefill_first", 0)
        assert [each.partition(" ")[0] for each in outcome["first"]] == ["prefill"]
        await up.until(lambda: as_wanted(up))
        assert (await up.tell(Describe()))["strategy"] == "prefill_first"
        again = await up.tell(Switch("prefill_first"))
        assert again["seconds"] is None
        assert json.loads((tmp_path / "run" / "wanted.json").read_text())["strategy"] == "prefill_first"


async def test_thresholds_reach_workers_that_serve_and_those_that_start_again_or_later(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        told = await up.tell(Set({"max_queued_requests": 9}))
        assert [each["changed"] for each in told[:2]] == [["max_queued_requests"]] * 2
        kill(up, "decode-0")
        await up.until(lambda: any("decode-0 is back" in line for line in up.said.lines))
        await up.tell(Scale({"decode": 3}))
        argvs = {each.name: each.spec.argv for each in up.supervisor.processes}
        assert all(argvs[name][-2:] == ("--max-queued-requests", "9") for name in ("decode-0", "decode-2"))


async def test_a_rollout_replaces_an_old_worker_that_dies_meanwhile_and_has_as_many_as_before(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        rolling = asyncio.create_task(up.tell(Rollout("v2", drain_seconds=5.0)))
        await up.until(lambda: up.keeper.of("v2"))
        kill(up, "decode-1")
        outcome = await rolling
        assert outcome["revision"] == "v2"
        assert (len(outcome["serving"]), len(outcome["left"])) == (3, 3)
        await up.until(lambda: as_wanted(up))
        assert {each.spec.revision for each in up.supervisor.processes} == {None, "v2"}
        described = await up.tell(Describe())
        assert (described["revisions"], len(described["workers"])) == (["v2"], 3)


async def test_an_old_worker_that_flips_during_a_rollout_leaves_with_its_revision(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        await flip_for_long(up, "decode-1", "prefill")
        rolling = asyncio.create_task(up.tell(Rollout("v2", drain_seconds=5.0)))
        await up.until(lambda: up.keeper.wanted.revision == "v2")
        (up.faults / "slow").unlink()
        assert len((await rolling)["left"]) == 3
        await up.until(lambda: as_wanted(up))
        assert {each.spec.revision for each in up.supervisor.processes} == {None, "v2"}


async def test_a_revision_whose_model_cannot_be_chatted_with_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    async with running(tmp_path) as up:
        with pytest.raises(ConfigError, match="has no chat_template"):
            await up.tell(Rollout("v2", model=str(model)))
        assert (up.keeper.wanted.following, sorted(up.roles())) == (None, ["decode-0", "prefill-0"])


@pytest.mark.parametrize("fault", ["crash-v2", "mute-v2"])
async def test_a_revision_that_cannot_serve_is_withdrawn_with_the_reason_and_the_old_one_serves_on(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "ANSWER_SECONDS", 0.3)
    async with running(tmp_path) as up:
        (up.faults / fault).touch()
        with pytest.raises(
            DisaggError, match=r"no such weights|decode-1: the frontend gets no answer from it"
        ):
            await up.tell(Rollout("v2"))
        await up.until(lambda: as_wanted(up))
        assert sorted(up.roles()) == ["decode-0", "prefill-0"]
        kill(up, "decode-0")
        await up.until(lambda: any("decode-0 is back" in line for line in up.said.lines))
        assert (await up.tell(Scale({"decode": 2})))["decode"] == 2
        assert up.supervisor.processes[-1].spec.revision == ""


async def test_a_rollout_that_ran_out_of_time_goes_on_or_is_taken_back(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        (up.faults / "mute-v2").touch()
        with pytest.raises(StageTimeoutError):
            await up.tell(Rollout("v2"), deadline=0.3, undo=True)
        await up.until(lambda: as_wanted(up))
        assert sorted(up.roles()) == ["decode-0", "prefill-0"]
        with pytest.raises(StageTimeoutError):
            await up.tell(Rollout("v3", drain_seconds=1.0), deadline=0.1)
        await up.until(lambda: up.keeper.wanted.revision == "v3" and as_wanted(up))
        with pytest.raises(ConfigError, match="--to"):
            await up.tell(Rollout("v 4"))


async def test_in_place_workers_are_replaced_one_by_one_and_what_is_missing_is_said(tmp_path: Path) -> None:
    async with running(tmp_path, prefill_workers=2, decode_workers=2) as up:
        most = 0

        def count() -> None:
            nonlocal most
            most = max(most, sum(each.is_running for each in up.supervisor.processes) - 1)

        said: list[str] = []
        rolling = asyncio.create_task(
            up.tell(Rollout("v2", drain_seconds=5.0, in_place=True), say=said.append)
        )
        while not rolling.done():
            await up.keeper.next_look()
            count()
        assert len((await rolling)["serving"]) == 4
        assert most <= 4
        assert "1 of 2 prefill workers serve while one of them loads" in said


async def test_a_worker_that_was_told_to_stop_by_something_else_is_missed_by_no_step(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        os.kill(up.pid("decode-1"), signal.SIGTERM)
        await up.until(lambda: up.keeper.wanted.workers["decode"] == 1)
        await up.until(lambda: as_wanted(up))
        assert await up.tell(Scale({"decode": 2})) == {"prefill": 1, "decode": 2}
        assert sorted(up.roles()) == ["decode-0", "decode-2", "prefill-0"]


async def test_a_flipping_worker_that_something_else_stops_is_missed_in_its_new_role(tmp_path: Path) -> None:
    async with running(tmp_path, prefill_workers=2) as up:
        await flip_for_long(up, "prefill-1", "decode")
        os.kill(up.pid("prefill-1"), signal.SIGTERM)
        await up.until(lambda: up.keeper.wanted.workers == {"prefill": 1, "decode": 1} and as_wanted(up))


async def test_a_begun_flip_that_is_taken_back_flips_back_and_no_other_worker_starts(tmp_path: Path) -> None:
    async with running(tmp_path, prefill_workers=2) as up:
        before = up.roles()
        await flip_for_long(up, "prefill-1", "decode", undo=True)
        (up.faults / "slow").unlink()
        await up.until(lambda: not any(each.becomes for each in up.keeper.seen) and as_wanted(up))
        assert up.roles() == before


async def test_a_flip_of_a_worker_that_is_scaled_away_fails_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, prefill_workers=3) as up:
        (up.faults / "slow").touch()
        flip = asyncio.create_task(up.tell(Flip("decode", process="prefill-2")))
        await up.until(lambda: any(each.becomes for each in up.keeper.seen))
        assert await up.tell(Scale({"decode": 1})) == {"prefill": 2, "decode": 1}
        with pytest.raises(DisaggError, match="another command has changed the same"):
            await asyncio.wait_for(flip, SECONDS)


async def test_an_old_worker_that_takes_no_command_stops_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that loads into its next role term."""

    async def refuse(*_: object) -> None:
        raise PeerUnavailableError("this worker is loading; it takes commands later")

    async with running(tmp_path) as up:
        monkeypatch.setattr(workers, "command_worker", refuse)
        assert len((await asyncio.wait_for(up.tell(Rollout("v2")), SECONDS))["left"]) == 2


async def test_numbers_by_flips_move_workers_and_start_only_what_is_missing(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        assert await up.tell(Scale({"prefill": 3, "decode": 1}, by_flips=True)) == {"prefill": 3, "decode": 1}
        roles = up.roles()
        assert len(roles) == 4
        assert sum(name.startswith("decode") and role == "prefill" for name, role in roles.items()) == 1


async def test_where_a_worker_refuses_to_flip_numbers_by_flips_start_and_stop(tmp_path: Path) -> None:
    async with running(tmp_path, decode_workers=2) as up:
        (up.faults / "refuse").touch()
        assert await up.tell(Scale({"prefill": 2, "decode": 1}, by_flips=True)) == {"prefill": 2, "decode": 1}
        assert up.roles() == {"prefill-0": "prefill", "decode-0": "decode", "prefill-1": "prefill"}


async def test_a_worker_that_dies_is_in_discovery_no_more(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        await up.until(lambda: all(each.instance for each in up.keeper.seen))
        instances = {each.name: each.instance for each in up.keeper.seen}
        listed = up.supervisor.config.run_dir / "discovery" / "v1" / "instances"
        listed.mkdir(parents=True)
        for instance in instances.values():
            (listed / f"dynamo%2Fbackend%2Fgenerate%2F{instance}").touch()
        kill(up, "decode-0")
        await up.until(lambda: len([*listed.iterdir()]) < 2)
        assert [*listed.iterdir()] == [listed / f"dynamo%2Fbackend%2Fgenerate%2F{instances['prefill-0']}"]


async def test_of_two_commands_that_want_different_numbers_the_later_one_is_done(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        first = asyncio.create_task(up.tell(Scale({"decode": 3})))
        await up.until(lambda: up.keeper.wanted.workers["decode"] == 3)
        assert (await up.tell(Scale({"decode": 2})))["decode"] == 2
        with pytest.raises(DisaggError, match="another command has changed the same"):
            await first
        await up.until(lambda: as_wanted(up))


@pytest.mark.parametrize(
    ("flags", "said", "revision"),
    [((), "`up` continues with it", "v2"), (("--undo",), "`up` takes it back", "")],
)
async def test_ctrl_c_of_a_command_says_whether_its_wish_stays(
    flags: tuple[str, ...], said: str, revision: str, tmp_path: Path
) -> None:
    async with running(tmp_path) as up:
        (up.faults / "mute-v2").touch()
        words = ("rollout", "--run-dir", str(tmp_path / "run"), "--to", "v2", "--drain-seconds", "1", *flags)
        command = await asyncio.create_subprocess_exec(
            *python("-m", "trtllm_disagg", *words), stderr=asyncio.subprocess.PIPE
        )
        await up.until(lambda: len(up.keeper.of("v2")) == 2)
        command.send_signal(signal.SIGINT)
        _, errors = await command.communicate()
        assert (command.returncode, said in errors.decode()) == (130, True), errors.decode()
        (up.faults / "mute-v2").unlink()
        await up.until(lambda: up.keeper.wanted.following is None and as_wanted(up))
        assert up.keeper.wanted.revision == revision
