"""What our own software adds to a request that is alone, by a server that takes a known time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.tools.bench.strategies.test_starting import MEASURED
from trtllm_disagg.tools.bench.strategies.arms import arms_at
from trtllm_disagg.tools.bench.strategies.measuring import Target
from trtllm_disagg.tools.bench.strategies.records import Plan
from trtllm_disagg.tools.bench.strategies.simulation import ModelledWorker
from trtllm_disagg.tools.bench.strategies.starting import (
    REQUESTS,
    TOKENS,
    WARM_UP,
    arm_to_calibrate_on,
    calibrate,
)
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN, Shape

ARMS = {arm.name: arm for arm in arms_at(2)}
#: A prompt takes some 300 ms, the rest of an answer some 400.
SLOW = MEASURED | {"prefill_token_us": 1200.0, "step_ms": 16.0}
ADDED = 0.1


@asynccontextmanager
async def server(worker: ModelledWorker) -> AsyncIterator[tuple[str, list[int]]]:
    """Takes what the worker's GPU takes, and `ADDED` seconds before the first token and after it. And the lengths of
    the prompts that it has had.
    """
    asked: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        asked.append(len(json.loads(await reader.readexactly(length))["prompt"]))
        shape = Shape(asked[-1], TOKENS - 1)
        first = worker.prefill_seconds(shape)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        event = b'data: {"choices": [{"text": "a"}]}\n\n'
        await asyncio.sleep(first + ADDED)
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await asyncio.sleep(worker.isolated_seconds(shape) - first + ADDED)
        events = event * (TOKENS - 1) + b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events))
        await writer.drain()
        writer.close()

    serving = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with serving:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}", asked


@pytest.mark.parametrize("arm", ["2 agg", "1P1D decode_first"])
async def test_calibrated_software_is_the_time_beyond_the_gpus(arm: str) -> None:
    worker = ModelledWorker.of({"model": "m", "modelled": {"measured": SLOW}, "max_seq_len": 16384})
    workers = dict.fromkeys(("agg", "prefill", "decode"), worker)
    async with server(worker) as (url, asked):
        found = await calibrate(Target(url, "m"), ARMS[arm], workers, {"chat": BUILT_IN["chat"]}, 3072)
    assert len(asked) == WARM_UP + REQUESTS
    # Up to what this machine takes itself, which is less than the GPU.
    assert 90 < found["chat"].first_token_ms < 300
    assert 90 < found["chat"].rest_ms < 300


def test_an_arm_with_two_workers_in_a_row_is_asked() -> None:
    chosen = ("2 agg", "1P1D router", "1P1D decode_first")
    plan = Plan("m", tuple(ARMS[name] for name in chosen), (), ())
    assert arm_to_calibrate_on(plan).name == "1P1D decode_first"
    assert arm_to_calibrate_on(Plan("m", (ARMS["2 agg"],), (), ())).name == "2 agg"
