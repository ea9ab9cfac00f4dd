"""`up` over stand-ins, for the tests of what it does with processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import trtllm_disagg
from tests.support.dynamo_deployment import DynamoDeployment
from tests.support.stand_ins import STAND_IN, UP, StartUp, Up
from trtllm_disagg.tools.up.plan import DeploymentConfig


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DynamoDeployment]:
    place = DynamoDeployment(tmp_path)
    yield place
    place.stop()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    command = (sys.executable, "-S", str(script))
    return {
        "strategy": "decode_first",
        "model": "models/toy",
        "served_model_name": "toy",
        "run_dir": tmp_path / "run",
        "http_port": 0,
        "worker_command": command,
        "frontend_command": command,
    }


@pytest.fixture
def config(settings: dict[str, Any]) -> DeploymentConfig:
    return DeploymentConfig(**settings)


@pytest.fixture
async def start_up(settings: dict[str, Any]) -> AsyncIterator[StartUp]:
    started: list[Up] = []

    async def start(**changes: Any) -> Up:
        changed = {**settings, **changes}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", UP, json.dumps(changed, default=str)),
            env={**os.environ, "PYTHONPATH": str(Path(trtllm_disagg.__file__).parents[1])},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(Up(process, changed["run_dir"]))
        return started[-1]

    yield start
    for up in started:
        if up.process.returncode is None:
            up.process.kill()
            await up.process.communicate()
