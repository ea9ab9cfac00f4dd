"""Processes die under load: what is in flight may fail, with a status that says so; nothing else does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.deployment import Deployment, DeploymentConfig, running_deployment
from trtllm_disagg.deployment.plan import Role, Strategy

ROOT = Path(__file__).parents[2]
UNAVAILABLE = 503


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


def config(strategy: Strategy, model: Path, run_dir: Path, twice: Role | None = None) -> DeploymentConfig:
    """One worker of each role, and a second one of the role `twice`."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    return DeploymentConfig(
        strategy=strategy,
        model=str(model),
        served_model_name="tiny",
        run_dir=run_dir,
        http_port=0,
        engine_configs={role: ROOT / "engine_configs" / "demo" / f"{role}.yaml" for role in roles},
        prefill_workers=1 + (twice == "prefill"),
        decode_workers=1 + (twice == "decode"),
    )


async def ask(
    client: httpx.AsyncClient, deployment: Deployment, prompt: str, max_tokens: int = 24
) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return await client.post(f"{deployment.base_url}/v1/completions", json=body)


async def texts(client: httpx.AsyncClient, deployment: Deployment, prompts: list[str]) -> dict[str, str]:
    answers = await asyncio.gather(*(ask(client, deployment, prompt) for prompt in prompts))
    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    return {p: a.json()["choices"][0]["text"] for p, a in zip(prompts, answers, strict=True)}


async def all_answered(client: httpx.AsyncClient, deployment: Deployment, prompts: list[str]) -> bool:
    answers = await asyncio.gather(*(ask(client, deployment, prompt) for prompt in prompts))
    return all(answer.status_code == 200 for answer in answers)


@pytest.mark.parametrize(("strategy", "second"), [("decode_first", "prefill"), ("prefill_first", "decode")])
async def test_killing_one_of_two_second_stage_workers_costs_only_what_it_was_doing(
    strategy: Strategy, second: Role, checkpoints: Checkpoints, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    prompts = [f"request number {i} of several" for i in range(16)]
    setting = config(strategy, checkpoints("llama"), tmp_path / "run", twice=second)
    async with running_deployment(setting) as deployment:
        undisturbed = await texts(client, deployment, prompts)
        victim = psutil.Process(deployment.of_role(second)[0].pid)
        (engine,) = victim.children()
        running = [asyncio.create_task(ask(client, deployment, prompt, 200)) for prompt in prompts]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=0.3)
        victim.kill()
        statuses = {(await task).status_code for task in running}
        assert statuses <= {200, UNAVAILABLE}
        # Its engine goes with it, whatever the way.
        await asyncio.to_thread(psutil.wait_procs, [engine], timeout=10)
        assert not engine.is_running()
        # The dead instance is forgotten, and then nothing fails any more; the answers are the same.
        async with asyncio.timeout(30):
            while not await all_answered(client, deployment, prompts):
                pass
        assert await texts(client, deployment, prompts) == undisturbed


async def test_a_worker_whose_engine_died_ends_and_says_why(checkpoints: Checkpoints, tmp_path: Path) -> None:
    setting = config("decode_first", checkpoints("llama"), tmp_path / "run")
    async with running_deployment(setting) as deployment:
        (decode,) = deployment.of_role("decode")
        worker = psutil.Process(decode.pid)
        (engine,) = worker.children()
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, [worker], timeout=20)
        assert not worker.is_running()
        assert "the engine process ended with exit code -9" in decode.log.read_text()
