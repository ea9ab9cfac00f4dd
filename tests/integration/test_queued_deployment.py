"""A deployment with a prefill queue: a prefill worker that dies under load, NATS gone and back."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import httpx
import psutil

from tests.integration.test_faults import PROMPTS, Said, ask, ask_all, config, texts, told
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import LOOPBACK


async def metric(client: httpx.AsyncClient, process: ManagedProcess, name: str) -> float | None:
    page = (await client.get(f"http://{LOOPBACK}:{process.spec.system_port}/metrics")).text
    values = re.findall(rf"^trtllm_disagg_{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)
    return float(values[0]) if values else None


async def prefills(client: httpx.AsyncClient, deployment: Deployment) -> list[float]:
    """Prompt tokens that went through each prefill worker."""
    workers = [process for process in deployment.of_role("prefill") if process.is_running]
    return [await metric(client, worker, "prefill_tokens_total") or 0 for worker in workers]


async def test_prefill_queue_survives_the_loss_of_a_worker_and_of_nats(
    llava: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    setting = replace(
        config("decode_first", llava, tmp_path / "run", twice="prefill"),
        prefill_dispatch="queue",
    )
    async with running_deployment(setting) as deployment:
        undisturbed = texts(await ask_all(client, deployment, 100))
        async with asyncio.timeout(30):
            # Both pull; which one pulls how often is theirs to say.
            while not all(tokens > 0 for tokens in await prefills(client, deployment)):
                assert texts(await ask_all(client, deployment, 100)) == undisturbed
        for process in (*deployment.of_role("decode"), *deployment.of_role("prefill")):
            await falls_to_zero(client, process, "prefill_queue_depth")
            await falls_to_zero(client, process, "prefill_queue_age_seconds")

        await a_prefill_worker_dies_under_load(client, deployment, undisturbed)
        await nats_goes_and_comes_back(client, deployment, undisturbed)
        assert (deployment.run_dir / "nats").is_dir()


async def falls_to_zero(client: httpx.AsyncClient, process: ManagedProcess, name: str) -> None:
    """Workers ask NATS from time to time."""
    async with asyncio.timeout(10):
        while await metric(client, process, name) != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def a_prefill_worker_dies_under_load(
    client: httpx.AsyncClient, deployment: Deployment, undisturbed: list[Said]
) -> None:
    """It was frozen before: it has tickets, accepted offers and calls."""
    running = [asyncio.create_task(ask(client, deployment, i, 100)) for i in range(len(PROMPTS))]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=0.2)
    dying = psutil.Process(deployment.of_role("prefill")[0].pid)
    dying.suspend()
    running += [asyncio.create_task(ask(client, deployment, i, 100)) for i in range(len(PROMPTS))]
    leaving = [asyncio.create_task(ask(client, deployment, i, 100)) for i in range(len(PROMPTS))]
    await asyncio.sleep(1.0)
    for client_that_leaves in leaving:
        client_that_leaves.cancel()
    dying.kill()
    assert texts([await task for task in running]) == undisturbed * 2
    assert texts(await ask_all(client, deployment, 100)) == undisturbed
    await asyncio.gather(*leaving, return_exceptions=True)


async def nats_goes_and_comes_back(
    client: httpx.AsyncClient, deployment: Deployment, undisturbed: list[Said]
) -> None:
    """Without it prefills are sent to one worker each, and every answer says so."""
    (nats,) = deployment.of_role("nats")
    nats.kill()
    answers = await ask_all(client, deployment, 100)
    assert texts(answers) == undisturbed
    assert {told(answer)["strategy"] for answer in answers} == {"decode_first"}
    # The worker that was killed may still be known, and tried.
    without_queue = "direct: the prefill queue cannot be reached: NATS is gone (--nats-server)"
    assert all(without_queue in told(answer)["fallbacks"] for answer in answers)
    # These deployments restart nothing by themselves.
    quiet = asyncio.subprocess.DEVNULL
    env = os.environ | nats.spec.env
    again = await asyncio.create_subprocess_exec(*nats.spec.argv, stdout=quiet, stderr=quiet, env=env)
    try:
        async with asyncio.timeout(30):
            while any("fallbacks" in told(answer) for answer in answers):
                answers = await ask_all(client, deployment, 100)
                assert texts(answers) == undisturbed
    finally:
        again.kill()
        await again.wait()
