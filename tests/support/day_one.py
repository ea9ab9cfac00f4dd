"""A pair of workers on the stand-in of TensorRT-LLM with all hard edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tests.support.handling import until
from tests.support.recording_pair import seeing
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.types import Generate

PESSIMISM = {"max_seq_len": 64, "max_num_tokens": 32}


INSTANCES = {Role.PREFILL: 1, Role.DECODE: 2}


def opened(**engine_args: Any) -> Engine:
    """An Engine on the current `tensorrt_llm` module."""
    args = {"model": "org/model", "cache_transceiver_config": {"backend": "NIXL"}}
    return Engine.open(load_api("tensorrt_llm"), args | engine_args, machine_id=70)


@dataclass(frozen=True, slots=True)
class DayOne:
    """A pair of workers of one strategy."""

    generate: Generate
    prefill: LLM
    decode: LLM
    client: RecordingStageClient

    async def quiet(self) -> None:
        """Wait until background work has ended."""
        await self.client.idle()
        await until(lambda: not num_in_background())
        await self.client.idle()

    @property
    def contexts(self) -> int:
        return self.prefill.held_contexts


class Both:
    """Each worker's client of the other, for draining through it."""

    def __init__(self, strategy: str, settings: dict[str, Any] | None = None, **engine_args: Any) -> None:
        """`settings`: of both workers."""
        self.engines = {role: opened(**(PESSIMISM | engine_args)) for role in (Role.PREFILL, Role.DECODE)}
        seeing(*self.engines.values())
        self.clients = {role: RecordingStageClient() for role in self.engines}
        self.handlers: dict[Role, Generate] = {}
        for role, engine in self.engines.items():
            self.clients[role].instance_id = INSTANCES[role]
            self.clients[role].description = msgspec.to_builtins(engine.facts)
            config = WorkerConfig(
                model="org/model", role=role, strategy=strategy, engine="tensorrt_llm", **(settings or {})
            )
            other = self.clients[Role.DECODE if role is Role.PREFILL else Role.PREFILL]
            self.handlers[role] = build_generate(config, engine, other, instance_id=INSTANCES[role])
        for role, handler in self.handlers.items():
            self.clients[role].serve_by(handler)

    def day_one(self, strategy: str) -> DayOne:
        entry = spec_of(strategy).entry_role
        assert entry is not None
        first = Role(entry)
        second = Role.DECODE if first is Role.PREFILL else Role.PREFILL
        prefill, decode = (self.engines[role].llm for role in (Role.PREFILL, Role.DECODE))
        return DayOne(self.handlers[first], prefill, decode, self.clients[second])


def kinds(llm: LLM) -> list[str | None]:
    """Request types that an engine received."""
    return [
        getattr(call.get("disaggregated_params"), "request_type", None)
        for call in llm.calls_of("generate_async")
    ]
