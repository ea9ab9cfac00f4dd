"""Two embedded engines with a deployment's two stages, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests.support.handling import until
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.publishers import OwnCache
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engine.readers import EngineReaders
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.services import build_generate
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


@asynccontextmanager
async def following(engine: Engine, block_size: int) -> AsyncIterator[LiveState]:
    """A worker's live state, which follows the engine's cache events."""
    live = LiveState.of(WorkerConfig(model="m", role=Role.DECODE), block_size)
    async with EngineReaders(engine, block_size, reads_statistics=False) as readers:
        own = OwnCache(readers.events, live.cached, 1)
        await own.start()
        yield live
        await own.stop()


def two_stages(
    engines: dict[Role, Engine], order: str, live: LiveState | None = None, **settings: Any
) -> tuple[Generate, RecordingStageClient]:
    """(first stage, its client of the second). `live`: the decode worker's."""

    def build(role: Role, client: RecordingStageClient) -> Generate:
        config = WorkerConfig(model="m", role=role, strategy=order, **settings)
        return build_generate(config, engines[role], client, live if role is Role.DECODE else None)

    first, second = (Role.PREFILL, Role.DECODE) if order == "prefill_first" else (Role.DECODE, Role.PREFILL)
    description = {"ctx_info_endpoint": engines[second].ctx_info_endpoint}
    client = RecordingStageClient(build(second, RecordingStageClient()), description=description)
    return build(first, client), client


async def both_idle(engines: dict[Role, Engine]) -> None:
    await until(lambda: not any(engine.llm.num_active_requests for engine in engines.values()))
