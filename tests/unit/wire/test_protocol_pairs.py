"""The three handoff protocols between real embedded engines; and both phases of the concurrent one end together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from tests.support.engine_pair import PROMPT, both_idle, open_engines, two_stages
from tests.support.handling import collect, request, tokens_of
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate, GenerateRequest

STYLES = {
    "dynamo": ScheduleStyle.CONTEXT_FIRST,
    "two_phase": ScheduleStyle.CONTEXT_FIRST,
    "bootstrap": ScheduleStyle.GENERATION_FIRST,
}


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> Iterator[dict[Role, Engine]]:
    with open_engines(checkpoints()) as started:
        yield started


def pair(engines: dict[Role, Engine], order: str, protocol: str) -> tuple[Generate, RecordingStageClient]:
    return two_stages(
        engines,
        order,
        schedule_style=STYLES[protocol],
        handoff_protocol=protocol,
        # What fails here is the caller's to know.
        on_missing_stage="fail",
    )


def asked(max_tokens: int = 8) -> GenerateRequest:
    return request(max_tokens, token_ids=PROMPT, sampling_options={"temperature": 0.0})


@pytest.mark.parametrize(
    ("protocol", "order", "max_tokens"),
    [
        ("dynamo", "prefill_first", 1),
        ("dynamo", "decode_first", 8),
        ("two_phase", "prefill_first", 8),
        ("two_phase", "decode_first", 1),
        ("bootstrap", "prefill_first", 1),
        ("bootstrap", "decode_first", 8),
        ("bootstrap", "prefill_first", 8),
    ],
)
async def test_the_answer_is_that_of_one_worker(
    engines: dict[Role, Engine], protocol: str, order: str, max_tokens: int
) -> None:
    alone = build_generate(
        WorkerConfig(model="m", role=Role.AGG), engines[Role.PREFILL], RecordingStageClient()
    )
    whole = await collect(alone, asked(max_tokens))
    generate, client = pair(engines, order, protocol)
    split = await collect(generate, asked(max_tokens))
    await client.idle()
    assert tokens_of(split) == tokens_of(whole)
    assert split[-1].finish_reason == whole[-1].finish_reason == "length"
    await both_idle(engines)
