"""`up` starts again what died. Stand-ins for frontend and workers, real processes and signals."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.stand_ins import DEADLINE, Exits, StartUp, Up, nothing_runs
from trtllm_disagg.admin.commands import Switch
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.commands import Scale
from trtllm_disagg.tools.up.http import lists_model
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.run_dir import is_alive

#: Waits that a test can afford.
SOON = {"first": 0.05, "max_delay": 0.2, "attempts": 3}
LONG = {"first": 600.0, "max_delay": 600.0}


async def becomes(up: Up, name: str, state: str) -> None:
    async with asyncio.timeout(DEADLINE):
        # A file has no event.
        while up.records()[name].state != state:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_killed_worker_is_reported_once_and_restarts_with_the_current_strategy(
    start_up: StartUp,
) -> None:
    up = await start_up(backoff=SOON)
    await up.ready_line()
    before = up.records()
    await asyncio.to_thread(send_to_up, up.run_dir, Switch("prefill_first"))

    os.kill(before["decode-0"].pid, signal.SIGKILL)
    await up.says("decode-0 is back")

    after = up.records()
    assert after["decode-0"].state == "ready"
    assert after["decode-0"].pid != before["decode-0"].pid
    assert after["decode-0"].ports == before["decode-0"].ports
    assert is_alive(after["decode-0"])
    assert after["prefill-0"] == before["prefill-0"]
    assert up.errors.count("error: decode-0 died while serving: killed by SIGKILL") == 1
    assert "; restarting in 0.05 s\n" in up.errors
    assert "  stand-in loads the decode under decode_first\n" in up.errors
    log = (up.run_dir / "decode-0.log").read_text()
    assert log.index("under decode_first") < log.index("--- started again at ")
    assert log.index("--- started again at ") < log.index("under prefill_first")
    exits = Exits(up.all_pids())
    up.process.terminate()
    assert await up.ends() == 0
    await exits.all_seen()


@pytest.mark.parametrize(("flag", "said"), [("--unlisted-file", "lists []"), ("--closed-file", "closed")])
async def test_a_restarted_first_stage_is_ready_when_the_frontend_serves_its_model(
    flag: str, said: str, start_up: StartUp, tmp_path: Path
) -> None:
    refuses = tmp_path / "refuses"
    up = await start_up(backoff=SOON, frontend_args=(flag, str(refuses)))
    await up.ready_line()
    refuses.touch()

    os.kill(up.pid("decode-0"), signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        while said not in up.log_of("frontend"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    assert up.records()["decode-0"].state == "starting"
    refuses.unlink()
    await up.says("decode-0 is back")
    up.process.terminate()
    assert await up.ends() == 0


async def test_a_killed_frontend_comes_back_on_its_port_and_the_workers_stay(start_up: StartUp) -> None:
    up = await start_up(backoff=SOON)
    await up.ready_line()
    before = up.records()

    os.kill(before["frontend"].pid, signal.SIGSEGV)
    await up.says("frontend is back")

    after = up.records()
    assert after["frontend"].ports == before["frontend"].ports
    assert await lists_model(LOOPBACK, after["frontend"].ports["http"], "toy")
    assert all(after[name] == before[name] for name in ("prefill-0", "decode-0"))
    up.process.terminate()
    assert await up.ends() == 0


async def test_a_worker_that_dies_at_every_start_is_given_up_with_its_cause(
    start_up: StartUp, tmp_path: Path
) -> None:
    crash = tmp_path / "crash"
    up = await start_up(backoff=SOON, worker_args=("--crash-file", str(crash)))
    await up.ready_line()
    crash.touch()

    os.kill(up.pid("decode-0"), signal.SIGKILL)
    await up.says("given up after 3 failed starts")

    line = up.errors.splitlines()[-1]
    assert line.startswith("error: decode-0 died before it was ready: no such weights (exit code 3), pid ")
    assert f"`trtllm-disagg scale --run-dir {up.run_dir} --decode N`" in line
    waits = [line.rpartition(" in ")[2] for line in up.errors.splitlines() if "; restarting in" in line]
    assert waits == ["0.05 s", "0.1 s", "0.2 s"]
    await up.says("the other processes serve on")
    assert await lists_model(LOOPBACK, up.records()["frontend"].ports["http"], "toy")

    crash.unlink()
    await asyncio.to_thread(send_to_up, up.run_dir, Scale({"decode": 1}))
    assert up.records()["decode-1"].state == "ready"
    up.process.terminate()
    assert await up.ends() == 0
    assert nothing_runs(up.run_dir)


async def test_nats_that_dies_at_every_start_is_started_until_it_serves(start_up: StartUp) -> None:
    """Without it no worker that dies comes back."""
    up = await start_up(backoff=SOON, prefill_dispatch="queue")
    await up.ready_line()
    store = up.run_dir / "nats"
    shutil.rmtree(store)
    store.touch()
    os.kill(up.pid("nats"), signal.SIGKILL)
    for _ in range(4):  # one more than it takes to give up a worker
        await up.says("error: nats died before it was ready")

    store.unlink()
    await up.says("nats is back")
    up.process.terminate()
    assert await up.ends() == 0


async def test_a_frontend_that_is_given_up_ends_everything_with_its_cause(
    start_up: StartUp, tmp_path: Path
) -> None:
    crash = tmp_path / "crash"
    up = await start_up(backoff=SOON, frontend_args=("--crash-file", str(crash)))
    await up.ready_line()
    exits = Exits(up.all_pids())
    crash.touch()

    os.kill(up.pid("frontend"), signal.SIGKILL)

    assert await up.ends() == 1
    await exits.all_seen()
    assert "error: frontend died before it was ready: no such weights (exit code 3)" in up.errors
    assert "given up after 3 failed starts\n" in up.errors


async def test_a_stop_during_the_back_off_ends_at_once(start_up: StartUp) -> None:
    up = await start_up(backoff=LONG)
    await up.ready_line()
    exits = Exits(up.all_pids())
    os.kill(up.pid("decode-0"), signal.SIGKILL)
    await becomes(up, "decode-0", "restarting")

    up.process.terminate()

    assert await up.ends() == 0
    await exits.all_seen()
    assert {record.state for record in up.records().values()} == {"exited"}
    assert nothing_runs(up.run_dir)


async def test_worker_stopped_by_sigterm_is_not_restarted_and_scale_replaces_it(start_up: StartUp) -> None:
    up = await start_up(backoff=SOON, decode_workers=2)
    await up.ready_line()

    os.kill(up.pid("decode-1"), signal.SIGTERM)
    await up.says("decode-1 has left: another program stopped it")
    assert "it was the last" not in up.errors
    os.kill(up.pid("decode-0"), signal.SIGTERM)
    await up.says("it was the last decode worker: `trtllm-disagg scale --run-dir")
    said = await asyncio.to_thread(send_to_up, up.run_dir, Scale({"decode": 1}))

    assert said == {"prefill": 1, "decode": 1}
    assert up.records()["decode-2"].state == "ready"
    up.process.terminate()
    assert await up.ends() == 0


async def test_without_restarts_a_death_is_reported_and_the_rest_goes_on(start_up: StartUp) -> None:
    up = await start_up(decode_workers=2, restart=False)
    await up.ready_line()
    engine = Exits([up.child_pid("decode-1")])

    os.kill(up.pid("decode-1"), signal.SIGKILL)

    await up.says("decode-1 died while serving: killed by SIGKILL")
    await up.says("stand-in loads the decode")
    await up.says("the other processes serve on")
    await engine.all_seen()
    assert up.records()["decode-1"].state == "exited"
    assert is_alive(up.records()["decode-0"])
    assert await lists_model(LOOPBACK, up.records()["frontend"].ports["http"], "toy")
    up.process.terminate()
    assert await up.ends() == 0


def replace_discovery(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "discovery")
    (run_dir / "discovery").mkdir()


@pytest.mark.parametrize("lose", [shutil.rmtree, replace_discovery])
async def test_a_lost_run_directory_is_reported_once(lose: Callable[[Path], Any], start_up: StartUp) -> None:
    """The processes hear of no change to another directory, so only a new `up` helps."""
    up = await start_up()
    await up.ready_line()

    lose(up.run_dir)

    await up.says(f"error: {up.run_dir / 'discovery'} was removed or moved, ")
    up.process.terminate()
    assert await up.ends() == 0
    assert up.errors.count("was removed or moved") == 1
