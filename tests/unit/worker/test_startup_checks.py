"""The checks of a start, where two workers that do not fit together start at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.worker.test_pairing import described
from trtllm_disagg.commands import DescribedInstance
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.worker.pairing import ModelIdentity
from trtllm_disagg.worker.startup_checks import Describes, ModelNameGuard, StartupChecks

PLACE = "dyn://dynamo.backend.generate"
CONFIG = WorkerConfig(model="org/model", engine="embedded", role=Role.DECODE)
IDENTITY = ModelIdentity("org/model", "org/model", "ab", role="decode")


class LateDirectory:
    """The watch at the other role's endpoint that has not heard of the newest worker yet."""

    async def second_stage(self, endpoint_id: str) -> Describes | None:
        raise AssertionError(f"a second stage at {endpoint_id}")

    async def partners(self, endpoint_id: str) -> list[dict[str, Any]]:
        return []


def checks(*others: dict[str, Any]) -> StartupChecks:
    """Of a decode worker that is seen with these."""

    async def look() -> list[DescribedInstance]:
        return [
            DescribedInstance(PLACE, 5 + i, each) for i, each in enumerate([described("decode"), *others])
        ]

    return StartupChecks(CONFIG, ModelNameGuard(IDENTITY, 5, {PLACE}, look), LateDirectory())


async def test_a_partner_that_is_listed_with_this_worker_is_compared_though_its_watch_is_late() -> None:
    with pytest.raises(ConfigError, match="tokens_per_block"):
        await checks(described("prefill", block_size=64)).before_registering(described("decode"))


async def test_one_that_fits_and_others_of_the_same_role_are_no_hindrance() -> None:
    others = (described("prefill"), described("decode", block_size=64))
    await checks(*others).before_registering(described("decode"))
