"""Two workers of one strategy in this process, each on a scripted LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from PIL import Image

from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.image_inputs import Decode, ImageInputs
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.types import Generate, GenerateRequest, Images, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_chunk

MAX_SEQ_LEN = 512


def recording_engine(**engine_args: Any) -> Engine:
    """An Engine on a scripted LLM, which is `engine.llm`."""
    args = {"model": "org/model", "max_seq_len": MAX_SEQ_LEN, "cache_transceiver_config": {"backend": "NIXL"}}
    engine = Engine.open(load_api("recording"), args | engine_args, machine_id=0)
    seeing(engine)
    return engine


class Loader:
    """Loads an image of the colour that an address names; the server of `silent` never answers."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.waits, self.was_left = asyncio.Event(), asyncio.Event()

    async def __call__(self, images: Images) -> Decode:
        urls = [each["Url"] for each in images.references]
        self.loaded += urls
        if "missing" in urls:
            raise InvalidRequestError("image 1 cannot be loaded: 404")
        if "silent" in urls:
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.was_left.set()
        return lambda: [Image.new("RGB", (8, 8), url) for url in urls]


def seeing(*engines: Engine) -> Loader:
    """Let these engines load images."""
    loader = Loader()
    for engine in engines:
        engine.images = ImageInputs(loader, engine.llm.input_processor)
    return loader


@dataclass(frozen=True, slots=True)
class Pair:
    """`generate` answers like the deployment. `client` calls the second stage (under `router`: decode)."""

    generate: Generate
    prefill: LLM
    decode: LLM
    client: RecordingStageClient
    clients: list[RecordingStageClient]
    engines: dict[Role, Engine]

    async def idle(self) -> None:
        """Wait until nothing runs on either worker."""
        for client in self.clients:
            await client.idle()


def make_pair(strategy: str, **settings: Any) -> Pair:
    """`settings`: of both workers."""
    spec = spec_of(strategy)
    engines = {role: recording_engine() for role in (Role.PREFILL, Role.DECODE)}
    unused = RecordingStageClient()

    def handler(role: Role, client: RecordingStageClient) -> Generate:
        # These decode workers get no cache events, so they would hand no answer back.
        own = ({} if spec.entry_role is None else {"pull_min_tokens": 0}) | settings
        config = WorkerConfig(model="org/model", role=role, strategy=strategy, **own)
        return build_generate(config, engines[role], client)

    if spec.entry_role is None:
        prefill, decode = (RecordingStageClient(handler(role, unused)) for role in engines)
        generate, client, clients = prefill_router(prefill, decode), decode, [prefill, decode]
    else:
        first, second = sorted(engines, key=lambda role: role != spec.entry_role)
        client = RecordingStageClient(handler(second, unused))
        generate, clients = handler(first, client), [client]
    return Pair(generate, engines[Role.PREFILL].llm, engines[Role.DECODE].llm, client, clients, engines)


def prefill_router(prefill: RecordingStageClient, decode: RecordingStageClient) -> Generate:
    """Call prefill and decode as Dynamo's frontend does."""

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        raw = request.raw
        stop_conditions = (raw.get("stop_conditions") or {}) | {"max_tokens": 1}
        answers = [
            answer async for answer in prefill.call(raw | {"stop_conditions": stop_conditions}, context)
        ]
        if not answers:
            return
        (answer,) = answers
        if "disaggregated_params" not in answer:
            yield decode_chunk(answer)
            return
        details = answer["completion_usage"]["prompt_tokens_details"]
        prefill_result = {
            "disaggregated_params": answer["disaggregated_params"] | {"worker_id": 7},
            "prompt_tokens_details": details,
        }
        async with aclosing(decode.call(raw | {"prefill_result": prefill_result}, context)) as chunks:
            async for chunk in chunks:
                yield decode_chunk(chunk)

    return generate


async def leftover_tasks() -> set[asyncio.Task[Any]]:
    """Tasks that still run after all had time to finish."""
    for _ in range(_ENOUGH_TICKS):
        await asyncio.sleep(0)
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


_ENOUGH_TICKS = 50
