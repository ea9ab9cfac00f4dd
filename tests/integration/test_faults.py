"""Processes die under load: what is in flight may fail, with a status that says so; nothing else does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.load import path_of, prompt_of
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.plan import DeploymentConfig, ProcessRole

ROOT = Path(__file__).parents[2]


def config(strategy: str, model: Path, run_dir: Path, twice: ProcessRole | None = None) -> DeploymentConfig:
    """One worker of each role, and a second one of the role `twice`."""
    roles: tuple[ProcessRole, ...] = ("prefill", "decode")
    return DeploymentConfig(
        strategy=strategy,
        model=str(model),
        served_model_name="tiny",
        run_dir=run_dir,
        http_port=0,
        engine_configs={role: ROOT / "engine_configs" / "demo" / f"{role}.yaml" for role in roles},
        images=(model / "preprocessor_config.json").exists(),
        prefill_workers=1 + (twice == "prefill"),
        decode_workers=1 + (twice == "decode"),
    )


#: The engine is exact: also the logprobs are those of an undisturbed run, to the bit.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 6, "presence_penalty": 0.7},
    {"temperature": 0, "logprobs": 1},
)
PROMPTS = [prompt_of(i, has_image=i in (4, 5, 6)) for i in range(8)]


async def ask(
    client: httpx.AsyncClient, deployment: Deployment, number: int, max_tokens: int = 24
) -> httpx.Response:
    body = {
        "model": "tiny",
        **PROMPTS[number],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "nvext": {"extra_fields": ["engine_data"]},
    }
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    return await client.post(deployment.base_url + path_of(body), json=body | sampling)


async def ask_all(
    client: httpx.AsyncClient, deployment: Deployment, max_tokens: int = 24
) -> list[httpx.Response]:
    return list(await asyncio.gather(*(ask(client, deployment, i, max_tokens) for i in range(len(PROMPTS)))))


#: The text of an answer, and the logprobs of its tokens if it has some.
Said = dict[str, Any]


def texts(answers: list[httpx.Response]) -> list[Said]:
    assert [answer.status_code for answer in answers] == [200] * len(answers), answers[0].text
    return [answer.json()["choices"][0] for answer in answers]


def told(answer: httpx.Response) -> dict[str, Any]:
    """What the workers say of a request."""
    said: dict[str, Any] = answer.json()["nvext"]["engine_data"]["disagg"]
    return said


@pytest.mark.parametrize(("strategy", "second"), [("decode_first", "prefill"), ("prefill_first", "decode")])
async def test_killing_the_second_stage_costs_no_request(
    strategy: str, second: ProcessRole, llava: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """One of two, then the other one too: others go on with what had begun, token by token the same."""
    setting = config(strategy, llava, tmp_path / "run", twice=second)
    async with running_deployment(setting) as deployment:
        undisturbed = texts(await ask_all(client, deployment, 200))
        for process in deployment.of_role(second):
            victim = psutil.Process(process.pid)
            (engine,) = victim.children()
            running = [asyncio.create_task(ask(client, deployment, i, 200)) for i in range(len(PROMPTS))]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=0.3)
            victim.kill()
            answers = [await task for task in running]
            assert texts(answers) == undisturbed
            # Its engine goes with it, whatever the way.
            await asyncio.to_thread(psutil.wait_procs, [engine], timeout=60)
            assert not engine.is_running()
        answers = await ask_all(client, deployment, 200)
        assert texts(answers) == undisturbed
        assert {told(answer)["fallbacks"][-1].partition(":")[0] for answer in answers} == {"local"}
