"""A deployment changes under steady load, half of it about images: another strategy, another role, more workers, fewer,
a dead one. No request notices.

Every answer, greedy or drawn with a seed, is compared with that of the same deployment before anything happened.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.integration.test_faults import config
from tests.support.deployments import Worker, wait_until
from tests.support.load import Body, Load, bodies, first_stage
from trtllm_disagg.admin.commands import CONTROL
from trtllm_disagg.admin.keys import AdminKey
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.commands import Scale
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import ProcessRole

SECONDS = 60.0


async def test_switch_scale_and_thresholds_under_load_fail_no_request(llava: Path, tmp_path: Path) -> None:
    async with loaded(llava, tmp_path / "run") as (deployment, load):
        (prefill,), (decode,) = deployment.of_role("prefill"), deployment.of_role("decode")
        held = bodies("tiny", 1)[0] | {"prompt": [*range(40, 140)], "max_tokens": 2}
        await load.ask(held)

        # -- another strategy, and back
        assert await switch(deployment, "prefill_first") == 0
        assert await first_stages(load) == 1
        await nothing_changes_without_the_key(deployment, tmp_path)
        now = await load.ask(held)
        # Cached when it was a second stage, and yet known to the frontend's router.
        assert now["timing"]["kv_hit_rate"] > 0.8

        # The command dies when the new first stage has come, and before the old one left.
        await die_half_way(deployment, "decode_first")
        await load.answers(10)
        assert await switch(deployment, "decode_first") == 0
        assert await first_stages(load) == 1
        assert first_stage(now) not in load.answered_by

        # -- what cannot be is refused, and what runs keeps running; clients of the frontend switch nothing
        assert await switch(deployment, "router") == 2
        smuggled = held | {CONTROL: {"command": "switch", "to": "prefill_first"}}
        refusal = await load.client.post(f"{load.url}/v1/completions", json=smuggled)
        assert refusal.status_code == 400
        assert load.wrong == []

        # -- more workers
        assert await scale(deployment, prefill=2, decode=2) == {"prefill": 2, "decode": 2}
        async with asyncio.timeout(SECONDS):
            while await first_stages(load) != 2:
                pass

        # -- a first stage dies, its requests go on where they were
        os.kill(decode.pid, signal.SIGKILL)
        await load.answers(30)
        assert load.wrong == []

        # -- fewer workers: the second stage that leaves finishes what it was asked for
        assert await scale(deployment, prefill=1, decode=2) == {"prefill": 1, "decode": 2}
        assert await scale(deployment, prefill=1, decode=1) == {"prefill": 1, "decode": 1}
        await load.answers(10)
        assert [p.name for p in deployment.of_role("prefill")] == [prefill.name]
    assert load.wrong == []


#: A strategy, the role of which there are two workers, one of which flips there and back, and the strategy in between.
FLIPS: list[tuple[str, ProcessRole, str | None]] = [
    ("decode_first", "decode", "prefill_first"),
    ("router", "prefill", None),
]


@pytest.mark.parametrize(("strategy", "role", "then"), FLIPS)
async def test_a_worker_that_flips_there_and_back_under_load_fails_no_request_and_keeps_its_cache(
    llava: Path, tmp_path: Path, strategy: str, role: ProcessRole, then: str | None
) -> None:
    other: ProcessRole = "decode" if role == "prefill" else "prefill"
    starting = deployed(llava, tmp_path / "run", strategy, role)
    with httpx.Client(timeout=SECONDS) as http:
        async with starting as (deployment, load):
            (stays,), (_, flips) = deployment.of_role(other), deployment.of_role(role)
            held = bodies("tiny", 1)[0] | {"prompt": [*range(40, 140)], "max_tokens": 2}
            async with load.running(at_once=4):
                if then is not None:
                    await load.ask(pinned(held, instance_of(flips, http)))
                await flips_to(other, flips, deployment, load, http)
                if then is not None:
                    assert await switch(deployment, then) == 0
                    # Cached in the role before, and yet known to the frontend's router.
                    now = await load.ask(pinned(held, instance_of(flips, http)))
                    assert now["timing"]["kv_hit_rate"] > 0.8
                    about_image = await load.ask(pinned(load.bodies[2], instance_of(flips, http)))
                    assert about_image["completion_token_ids"] == load.expected[2]
                    assert first_stage(about_image) == instance_of(flips, http)
                await flips_to(role, flips, deployment, load, http)
                code, said = await flip(deployment, instance_of(stays, http), role)
                assert (code, f"it is the last {other} worker" in said) == (1, True)
            assert load.wrong == []
            workers = [Worker(each, http) for each in (stays, *deployment.of_role(role))]
            wait_until(lambda: not any(each.held_and_counted()[0] for each in workers), "all blocks are free")


def pinned(body: Body, instance: int) -> Body:
    return body | {"nvext": body["nvext"] | {"backend_instance_id": instance}}


async def flips_to(
    to: str, process: ManagedProcess, deployment: Deployment, load: Load, http: httpx.Client
) -> None:
    was = instance_of(process, http)
    code, said = await flip(deployment, was, to)
    assert (code, process.role) == (0, to), said
    assert f"{instance_of(process, http):x}" in said
    await load.answers(24)
    # In its new role, on a page of its own.
    assert Worker(process, http).num_requests() > 0
    code, said = await flip(deployment, was, to)
    assert (code, "--instance" in said) == (2, True), "the instance that it was is gone"


def instance_of(process: ManagedProcess, http: httpx.Client) -> int:
    return Worker(process, http).instance_id


async def flip(deployment: Deployment, instance: int, to: str) -> tuple[int, str]:
    """The exit code of the real command, and what it says."""
    words = ("flip", "--run-dir", str(deployment.run_dir), "--instance", f"{instance:x}", "--to", to)
    code, lines = await run_command(*words)
    return code, "\n".join(lines)


@asynccontextmanager
async def loaded(model: Path, run_dir: Path) -> AsyncIterator[tuple[Deployment, Load]]:
    async with deployed(model, run_dir, "decode_first") as (deployment, load), load.running(at_once=4):
        yield deployment, load


@asynccontextmanager
async def deployed(
    model: Path, run_dir: Path, strategy: str, twice: ProcessRole | None = None
) -> AsyncIterator[tuple[Deployment, Load]]:
    setting = replace(config(strategy, model, run_dir, twice), frontend_args=("--migration-limit", "3"))
    async with running_deployment(setting) as deployment, httpx.AsyncClient(timeout=SECONDS) as client:
        load = Load(client, deployment.base_url, bodies("tiny", 8, images=True))
        await load.learn()
        yield deployment, load


async def switch(deployment: Deployment, to: str) -> int:
    """The exit code of the real command. It says what it does, and nothing else."""
    code, lines = await run_command("switch", "--to", to, "--run-dir", str(deployment.run_dir))
    assert len(lines) <= 6, lines
    assert not any("\x1b" in line or " INFO " in line for line in lines)
    return code


async def nothing_changes_without_the_key(deployment: Deployment, directory: Path) -> None:
    """For any process that finds the workers: their endpoints are open to all of this machine."""
    by_discovery = {"DYN_FILE_KV": str(deployment.run_dir / "discovery"), "XDG_STATE_HOME": str(directory)}
    there = ("switch", "--to", "decode_first", "--namespace", deployment.config.namespace, "--settle", "0.1")
    code, lines = await run_command(*there, **by_discovery)
    assert (code, "--key-file is missing" in lines[-1]) == (2, True)

    AdminKey.create(directory / "another")
    code, lines = await run_command(*there, "--key-file", str(directory / "another"), **by_discovery)
    assert (code, "the key that all workers have; these have another" in lines[-1]) == (2, True)

    code, lines = await run_command("switch", "--to", "prefill_first", "--run-dir", str(deployment.run_dir))
    assert (code, len(lines)) == (0, 1), "it is what it was"


async def die_half_way(deployment: Deployment, to: str) -> None:
    command = await start_command("switch", "--to", to, "--run-dir", str(deployment.run_dir))
    assert command.stdout is not None
    async with asyncio.timeout(SECONDS):
        async for line in command.stdout:
            if b"is a first stage" in line:
                command.kill()
        await command.wait()
    assert command.returncode == -signal.SIGKILL


async def run_command(*words: str, **environment: str) -> tuple[int, list[str]]:
    """The exit code, and what it says."""
    command = await start_command(*words, **environment)
    async with asyncio.timeout(SECONDS):
        told, _ = await command.communicate()
    assert command.returncode is not None
    return command.returncode, told.decode().splitlines()


async def start_command(*words: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *python("-m", "trtllm_disagg", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | environment,
    )


async def scale(deployment: Deployment, **workers: int) -> dict[str, int]:
    running: dict[str, int] = await asyncio.to_thread(send_to_up, deployment.run_dir, Scale(workers))
    return running


async def first_stages(load: Load) -> int:
    """How many instances the frontend sends requests to."""
    load.answered_by.clear()
    await load.answers(20)
    return len(load.answered_by)
