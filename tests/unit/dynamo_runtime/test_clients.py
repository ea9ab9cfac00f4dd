"""The clients of other workers, where the machine has no inotify instance left."""

from __future__ import annotations

from typing import Any

import pytest

from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.dynamo_runtime.discovery import Clients
from trtllm_disagg.errors import ConfigError


class Failing:
    """Dynamo's runtime and endpoint, with an error as Dynamo has it."""

    def endpoint(self, name: str) -> Failing:
        return self

    async def client(self) -> Any:
        raise Exception("filesystem error: Too many open files (os error 24)")


async def test_a_client_without_an_inotify_instance_is_a_setting_with_advice() -> None:
    clients = Clients(WorkerConfig(model="m"), Failing())
    with pytest.raises(ConfigError, match=r"no inotify instance is left .*sudo sysctl fs\.inotify"):
        await clients.of("dyn://n.c.e")
