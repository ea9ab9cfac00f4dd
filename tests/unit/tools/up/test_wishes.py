"""`scale` and `set` of an `up`: which workers come and leave, and how they start. Its real processes only say
that they are healthy; those of `test_keeper.py` describe themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace

import pytest

from tests.support.commanded_up import tell
from trtllm_disagg.admin.commands import Set
from trtllm_disagg.common.cli import run
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.tools.up.commands import Scale, UpCommand
from trtllm_disagg.tools.up.gpus import GpuNeeds, Gpus
from trtllm_disagg.tools.up.run_dir import is_alive, read_processes
from trtllm_disagg.tools.up.supervisor import Supervisor

DYING = "import sys; print('no such model'); sys.exit(3)"


async def test_scale_prints_what_runs(supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scale", "--run-dir", str(supervisor.config.run_dir), "--prefill", "1"]
    assert await asyncio.to_thread(run, words) is ExitCode.DONE
    assert capsys.readouterr().out == "scaled: 1 prefill, 0 decode\n"
    assert await asyncio.to_thread(run, [*words, "--json"]) is ExitCode.DONE
    assert json.loads(capsys.readouterr().out) == {"prefill": 1, "decode": 0}


def alive(supervisor: Supervisor) -> list[str]:
    """As `processes.json` tells it."""
    return [record.name for record in read_processes(supervisor.config.run_dir) if is_alive(record)]


async def test_scale_changes_workers_and_processes_json(supervisor: Supervisor) -> None:
    line, said = await tell(supervisor, Scale({"prefill": 2, "decode": 1}))
    assert line == {"prefill": 2, "decode": 1}
    started = [text.split()[0] for text in said if text.endswith("starts")]
    assert started == alive(supervisor) == ["prefill-0", "prefill-1", "decode-0"]
    descriptors = len(os.listdir("/proc/self/fd"))

    line, said = await tell(supervisor, Scale({"prefill": 1}))
    assert line == {"prefill": 1, "decode": 1}
    assert said == ["prefill-1 finishes its requests and leaves", "prefill-1 has left"]
    assert [record.name for record in read_processes(supervisor.config.run_dir)] == ["prefill-0", "decode-0"]

    # A name is used once: the log of the one before stays.
    await tell(supervisor, Scale({"prefill": 2}))
    assert alive(supervisor) == ["prefill-0", "decode-0", "prefill-2"]
    assert len(os.listdir("/proc/self/fd")) == descriptors, "ports are given back"


async def test_a_new_worker_gets_no_gpu_of_one_that_still_drains(supervisor: Supervisor) -> None:
    one_each = Gpus({"prefill": ("0", "1")}, {"prefill": GpuNeeds(1, 0.9, 60.0)})
    supervisor.config = replace(supervisor.config, gpus=one_each)
    await tell(supervisor, Scale({"prefill": 1}))
    supervisor.processes[0].leaves()

    scaling = asyncio.create_task(tell(supervisor, Scale({"prefill": 1})))
    async with asyncio.timeout(20):
        while len(supervisor.processes) < 2:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    supervisor.processes[0].terminate()
    await scaling

    assert [each.spec.env["CUDA_VISIBLE_DEVICES"] for each in supervisor.processes] == ["0", "1"]


async def test_worker_that_dies_at_scale_up_is_reported_with_its_log_and_removed(
    supervisor: Supervisor,
) -> None:
    await tell(supervisor, Scale({"prefill": 1}))
    supervisor.config = replace(supervisor.config, worker_command=(sys.executable, "-c", DYING))
    with pytest.raises(DisaggError, match=r"prefill-1 .*exit code 3[\s\S]*no such model"):
        await tell(supervisor, Scale({"prefill": 2}))
    assert alive(supervisor) == ["prefill-0"]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (Scale({"agg": 1}), "--prefill, --decode"),
        (Scale({"frontend": 2}), "--frontend"),
        (Scale({"prefill": 0}), "1 to 64"),
        (Scale({"prefill": 2, "decode": 65}), "--decode: 65"),
    ],
)
async def test_wrong_counts_are_refused_before_anything_starts(
    supervisor: Supervisor, wanted: UpCommand, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        await tell(supervisor, wanted)
    assert supervisor.processes == []


async def test_scaled_up_worker_starts_with_current_thresholds(supervisor: Supervisor) -> None:
    await tell(supervisor, Set({"max_local_prefill_length": 7, "eff_isl_ratio_threshold": 0.5}))
    await tell(supervisor, Set({"max_local_prefill_length": 9}))
    wrongs: list[dict[str, int | float | str | bool]] = [{"max_local_prefill_length": -1}, {"no_such": 1}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="set"):
            await tell(supervisor, Set(wrong))
    await tell(supervisor, Scale({"prefill": 1}))
    argv = supervisor.processes[0].spec.argv
    assert argv[-4:] == ("--max-local-prefill-length", "9", "--eff-isl-ratio-threshold", "0.5")
    # What no worker takes would keep further ones from starting.
    ((told,), _) = await tell(supervisor, Set({"max_local_prefill_length": 7}))
    assert "its version has no description" in told["error"]
    assert supervisor.config.thresholds["max_local_prefill_length"] == 9
