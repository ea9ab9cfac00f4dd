"""Counts function calls per request: `python -m benchmarks.overhead --calls`. Times vary from run to run, calls do not.

Both workers run in this process on the recording engine, without Dynamo's runtime. Counts the worker's Python functions
and the C functions that they call, but no functions of the engine or of other libraries.
"""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from dynamo._core import Context

import trtllm_disagg
from benchmarks.report import Column, Grid, Say, Section
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime.handler import Handler
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.handlers import outputs
from trtllm_disagg.handlers.selection import NoStage
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.types import GenerateRequest, RequestContext

#: Answers a request: Dynamo's body and context -> chunks.
Handle = Callable[[dict[str, Any], Any], AsyncIterator[dict[str, Any]]]

_PACKAGE = Path(trtllm_disagg.__file__).parent
_COUNTED = tuple(str(path.resolve()) + "/" for path in (_PACKAGE, _PACKAGE / "handlers"))
_UPSTREAM = "/dynamo/trtllm/"
_NOT_COUNTED = str(_PACKAGE / "engines")
_ENGINE_ARGS = {"model": "org/model", "max_seq_len": 4096, "cache_transceiver_config": {"backend": "NIXL"}}
_PROMPT = list(range(16, 48))
#: Number of requests before counting starts (the first ones fetch descriptions of peers), and of counted requests.
_BEFORE, _COUNTED_REQUESTS = 3, 5
#: Answer lengths in tokens. Their difference gives the calls of a further token.
SHORT, LONG = 8, 40


class Calls:
    """Number of Python functions called, and of C functions that these called."""

    def __init__(self) -> None:
        self.python = self.c = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def all(self) -> int:
        return self.python + self.c

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        is_worker = file.startswith(_COUNTED) and not file.startswith(_NOT_COUNTED)
        if is_worker or _UPSTREAM in file:
            self.python += event == "call"
            self.c += event == "c_call"


class _Neighbour(NoStage):
    """The worker of the other role, in this process: a StageClient and its only instance."""

    instance_id = 1

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def pick(self, request: GenerateRequest) -> _Neighbour:
        return self

    def instance_ids(self) -> Collection[int]:
        return [self.instance_id]  # a list, like discovery's

    def instance(self, instance_id: int) -> _Neighbour:
        return self

    async def describe(self) -> dict[str, Any]:
        return {}

    async def notify(self, notice: dict[str, Any]) -> None:
        """Ignored: nothing here is recalled."""

    async def call(
        self, request: dict[str, Any], context: RequestContext | None
    ) -> AsyncGenerator[dict[str, Any], None]:
        async for answer in self._handle(request, context or Context()):
            yield answer


def ours(strategy: str) -> Handle:
    """Yield handlers of this project's workers: both roles, or one worker for `agg`."""

    def worker(role: Role, stage: Any) -> Handle:
        config = WorkerConfig(model="org/model", role=role)
        if role is not Role.AGG:
            config = replace(config, strategy=strategy)
        engine = Engine.open(load_api("recording"), _ENGINE_ARGS, machine_id=0)
        return Handler(build_generate(config, engine, stage), dict).function

    if not (spec := spec_of(strategy)).is_disaggregated:
        return worker(Role.AGG, NoStage())
    if spec.entry_role is None:
        return _chained(worker(Role.PREFILL, NoStage()), worker(Role.DECODE, NoStage()))
    first = Role(spec.entry_role)
    second = Role.DECODE if first is Role.PREFILL else Role.PREFILL
    return worker(first, _Neighbour(worker(second, NoStage())))


async def upstreams(*, is_disaggregated: bool) -> Handle:
    """Yield handlers of Dynamo's own worker, a pair chained as by Dynamo's frontend."""
    from benchmarks.upstream_worker import mount_recording_engine

    mount_recording_engine()
    from dynamo.trtllm import engine
    from dynamo.trtllm.constants import DisaggregationMode
    from dynamo.trtllm.request_handlers import handler_base, handlers

    from trtllm_disagg.engines.recording.llm import SamplingParams

    async def worker(mode: Any) -> Handle:
        opened = engine.TensorRTLLMEngine(dict(_ENGINE_ARGS), mode)
        await opened.initialize()
        config = handler_base.RequestHandlerConfig(
            opened,
            SamplingParams(detokenize=False),
            publisher=None,
            disaggregation_mode=mode,
            max_seq_len=4096,
        )
        handle: Handle = handlers.get_request_handler(config).generate
        return handle

    if not is_disaggregated:
        return await worker(DisaggregationMode.AGGREGATED)
    return _chained(await worker(DisaggregationMode.PREFILL), await worker(DisaggregationMode.DECODE))


def _chained(prefill: Handle, decode: Handle) -> Handle:
    """Call prefill, then decode, like Dynamo's frontend."""

    async def handle(request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        one = request | {"stop_conditions": request["stop_conditions"] | {"max_tokens": 1}}
        async for answer in prefill(one, context):
            handoff = {"disaggregated_params": answer["disaggregated_params"]}
        async for answer in decode(request | {"prefill_result": handoff}, context):
            yield answer

    return handle


async def count_calls(strategies: Sequence[str], say: Say, *, with_upstream: bool) -> Section:
    handles = {strategy: ours(strategy) for strategy in strategies}
    if with_upstream:
        for is_disaggregated in sorted({spec_of(each).is_disaggregated for each in strategies}):
            name = "dynamo.trtllm " + ("router" if is_disaggregated else "agg")
            handles[name] = await upstreams(is_disaggregated=is_disaggregated)
    rows = {}
    for name, handle in handles.items():
        say(name)
        short, long = [await count(handle, tokens) for tokens in (SHORT, LONG)]
        per_token = (long.all - short.all) / (LONG - SHORT)
        rows[name,] = {"Python": short.python, "C": short.c, "all": short.all, "token": per_token}
    columns = [Column(name, "calls", ".0f") for name in ("Python", "C", "all")]
    columns.append(Column("token", "calls", ".1f", "each further token"))
    title = f"Function calls of an answer of {SHORT} tokens, on both workers"
    return Section(title, [Grid(title, ("order",), columns, rows, "{0} {column}")])


async def count(handle: Handle, num_tokens: int) -> Calls:
    """The fewest calls of several requests: a busy machine adds ticks. Raises RuntimeError for an incomplete answer."""
    for _ in range(_BEFORE):
        await _answer(handle, num_tokens)
    counted = [Calls() for _ in range(_COUNTED_REQUESTS)]
    for calls in counted:
        # Counting slows the loop, so that handlers would take calls of an instant engine for steps.
        with patch.object(outputs, "STEP_SECONDS", math.inf), calls.counting():
            await _answer(handle, num_tokens)
    return min(counted, key=lambda calls: calls.all)


async def _answer(handle: Handle, num_tokens: int) -> None:
    stop = {"max_tokens": num_tokens, "ignore_eos": True}
    request = {"token_ids": _PROMPT, "stop_conditions": stop, "sampling_options": {}, "output_options": {}}
    tokens = [token async for answer in handle(request, Context()) for token in answer["token_ids"]]
    if len(tokens) != num_tokens:
        raise RuntimeError(f"{len(tokens)} tokens instead of {num_tokens}")
