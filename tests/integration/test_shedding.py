"""A flood on a small deployment: each request is answered or refused with a status that says so; nothing is left."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import Checkpoints
from tests.support.deployments import Served, served
from trtllm_disagg.tools.up.plan import DeploymentConfig

MODEL = "tiny"
NUM_REQUESTS = 200
MAY_WAIT = 16
OVERLOADED = 529


@pytest.fixture(scope="module")
def deployment(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = DeploymentConfig(
        strategy="decode_first",
        model=str(checkpoints()),
        served_model_name=MODEL,
        run_dir=tmp_path_factory.mktemp("shedding") / "run",
        http_port=0,
        engine="embedded",
        worker_args=("--max-batch-size", "4", "--max-queued-requests", str(MAY_WAIT)),
    )
    with served(config) as deployed:
        yield deployed


def body(number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": [2 + (number * 31 + i * 7) % 250 for i in range(60)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": number % 2 == 1,
        "nvext": {"extra_fields": ["engine_data"]},
    }


async def flood(deployed: Served, count: int, max_tokens: int = 40) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        url = f"{deployed.url}/v1/completions"
        return list(await asyncio.gather(*(client.post(url, json=body(i, max_tokens)) for i in range(count))))


def end_of(answer: httpx.Response) -> str:
    """A stream that waited for longer than the frontend looks for errors has the status of its end in it."""
    if answer.status_code == 200 and "event-stream" in answer.headers["content-type"]:
        *_, last, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]", answer.text
        said = json.loads(last.partition("data: ")[2])
    else:
        said = answer.json()
    if said.get("choices"):
        return "answered" if said["choices"][0]["finish_reason"] == "length" else answer.text
    return "refused" if (said.get("error") or said)["code"] == OVERLOADED else answer.text


def test_a_flood_is_answered_or_refused_and_leaves_nothing(deployment: Served) -> None:
    deployment.wait_until_idle()
    for _ in range(2):
        answers = asyncio.run(flood(deployment, NUM_REQUESTS))

        ends = Counter(end_of(answer) for answer in answers)
        assert set(ends) == {"answered", "refused"}, ends
        deployment.wait_until_idle()
    # Refusing it did not make the frontend leave the worker alone.
    (answer,) = asyncio.run(flood(deployment, 1))
    assert end_of(answer) == "answered"
