"""Two embedded engines, and the two stages of one deployment over them, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.handling import until
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.handlers.services import LiveState, build_generate
from trtllm_disagg.types import Generate

#: Three chunks long.
PROMPT = [2 + (i * 7 + i * i) % 250 for i in range(150)]


@contextmanager
def open_engines(model: Path, **changes: Any) -> Iterator[dict[Role, Engine]]:
    args = {
        "model": str(model),
        "kv_cache_config": {"max_tokens": 4096},
        "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": 5000},
        "max_seq_len": 512,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "enable_chunked_prefill": True,
        "skip_tokenizer_init": True,
    } | changes
    started = {
        role: Engine.open(load_api("embedded"), args, machine_id)
        for machine_id, role in enumerate((Role.PREFILL, Role.DECODE))
    }
    yield started
    for engine in started.values():
        engine.close()


def two_stages(
    engines: dict[Role, Engine], order: str, live: LiveState | None = None, **settings: Any
) -> tuple[Generate, RecordingStageClient]:
    """(the first stage, its way to the second one). `live`: of the first stage."""

    def build(role: Role, client: RecordingStageClient, live: LiveState | None = None) -> Generate:
        config = WorkerConfig(model="m", role=role, strategy=order, **settings)
        return build_generate(config, engines[role], client, live)

    first, second = (Role.PREFILL, Role.DECODE) if order == "prefill_first" else (Role.DECODE, Role.PREFILL)
    description = {"ctx_info_endpoint": engines[second].ctx_info_endpoint}
    client = RecordingStageClient(build(second, RecordingStageClient()), description=description)
    return build(first, client, live), client


async def both_idle(engines: dict[Role, Engine]) -> None:
    await until(lambda: not any(engine.llm.num_active_requests for engine in engines.values()))
