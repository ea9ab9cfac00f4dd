"""A supervisor without a process, that takes commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.commanded_up import worker_config
from trtllm_disagg.tools.up.command_socket import serving_commands
from trtllm_disagg.tools.up.run_dir import RunDir
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.supervisor import Supervisor


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    run_dir = RunDir.claim(tmp_path / ("a" * 120))
    supervisor = Supervisor(worker_config(run_dir.path), [], run_dir, Status())
    try:
        async with serving_commands(supervisor):
            yield supervisor
    finally:
        await supervisor.kill()
