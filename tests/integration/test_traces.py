"""The traces that `up` keeps in its run directory: every part of a request is there, and a slow one is found."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.deployments import DISAGGREGATED, MODEL_NAME, WORKER_SIDE, Served, wait_until
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.tracing.reading import Trace, find_trace, read_traces

TOKENS = 12
#: So long a worker stands still; nothing else of such a request takes a good part of that.
STOPPED_SECONDS = 2.0


def ask(deployed: Served) -> str:
    """The id of an answer to a prompt that no cache has."""
    prompt = random.choices(range(300, 1300), k=200)
    answer = deployed.openai.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=TOKENS, extra_body={"ignore_eos": True}
    )
    return answer.id


def trace_of(deployed: Served, request_id: str, *roots: str) -> Trace:
    """When all workers have written theirs, which is a moment after the answer."""
    found: list[Trace] = []

    def is_there() -> bool:
        found.clear()
        try:
            found.append(find_trace(read_traces(deployed.deployment.run_dir), request_id))
        except ConfigError:
            return False
        return {*roots} <= {node.span.name for node in found[0].nodes}

    wait_until(is_there, f"the trace of {request_id} has {roots}")
    return found[0]


PREFILL, DECODE = {"prefill", "engine_queue", "compute"}, {"decode", "kv_transfer", "decode_steps"}
#: Under router no worker calls another one: the frontend does.
CALLED = {"remote_prefill": "prefill_stage", "remote_decode": "decode_stage"}


@pytest.mark.parametrize("strategy", DISAGGREGATED)
def test_a_trace_has_both_phases_with_what_their_engines_took(strategy: str, deployed: Served) -> None:
    trace = trace_of(deployed, ask(deployed), "prefill", "decode")
    of_worker = {
        role: {node.span.name for node in trace.nodes if node.worker.startswith(role)}
        for role in ("prefill", "decode")
    }
    assert of_worker["prefill"] >= PREFILL
    assert of_worker["decode"] >= DECODE
    (transfer,) = (node.span for node in trace.nodes if node.span.name == "kv_transfer")
    assert int(str(transfer.attributes["kv_transfer.bytes"])) > 0
    assert transfer.attributes["kv_transfer.transport"] in TRANSPORTS
    assert transfer.attributes["kv_transfer.link"] == "this host"
    called = [stage for call, stage in CALLED.items() if call in {node.span.name for node in trace.nodes}]
    assert len(called) == (strategy in WORKER_SIDE)
    assert {node.span.name for node in trace.roots} == {"request"}
    assert len(trace.roots) == (1 if strategy in WORKER_SIDE else 2)


@contextmanager
def stopped(deployed: Served) -> Iterator[None]:
    """The second stage stands still inside the block, and goes on after it."""
    (worker,) = deployed.deployment.of_role("decode" if deployed.strategy == "prefill_first" else "prefill")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


@pytest.mark.parametrize("strategy", WORKER_SIDE)
def test_a_second_stage_that_stood_still_is_found_from_the_trace_alone(
    strategy: str, deployed: Served
) -> None:
    ask(deployed)
    with ThreadPoolExecutor(1) as client:
        with stopped(deployed):
            asked = client.submit(ask, deployed)
            # That is the fault; nothing waits for anything here.
            time.sleep(STOPPED_SECONDS)
        trace = trace_of(
            deployed, asked.result(), "prefill_stage" if strategy == "decode_first" else "decode_stage"
        )
    longest, milliseconds = trace.blame[0]
    assert longest.span.name == "dispatch"
    assert longest.worker == deployed.first_stage[0].name
    assert milliseconds > STOPPED_SECONDS * 1000 / 2
    instance = str(longest.span.attributes["instance"])
    assert int(instance, 16) == deployed.second_stage[0].instance_id
