"""The traces that `up` keeps in its run directory: every part of a request is there, and a slow one is found."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest

from tests.support.deployments import DISAGGREGATED, MODEL_NAME, RUN_BY_WORKERS, Served, wait_until
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.trace.reading import Trace, find_trace, read_traces
from trtllm_disagg.tools.up.plan import ProcessRole

TOKENS = 12
#: So long a worker stands still; nothing else of a short request takes a good part of that.
STOPPED_SECONDS = 0.4


def ask(
    deployed: Served,
    prompt_tokens: int = 200,
    answer_tokens: int = TOKENS,
    on_token: Callable[[], None] = lambda: None,
) -> str:
    """The id of an answer to a prompt that no cache has."""
    prompt = random.choices(range(300, 1300), k=prompt_tokens)
    answer = deployed.openai.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=answer_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    request_id = ""
    for chunk in answer:
        on_token()
        request_id = chunk.id
    return request_id


def trace_of(deployed: Served, request_id: str, *roots: str) -> Trace:
    """When all workers have written theirs, which is a moment after the answer."""
    found: list[Trace] = []

    def is_there() -> bool:
        found.clear()
        try:
            found.append(find_trace(read_traces(deployed.deployment.run_dir), request_id))
        except ConfigError:
            return False
        return {"http-request", *roots} <= {node.span.name for node in found[0].nodes}

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
    assert len(called) == (strategy in RUN_BY_WORKERS)
    (root,) = trace.roots
    assert (root.worker, root.span.name) == ("frontend", "http-request")
    asked = ["request"] * (1 if strategy in RUN_BY_WORKERS else 2)
    assert [node.span.name for node in root.children] == ["select", "dispatch", *asked]


@contextmanager
def stopped(deployed: Served, role: ProcessRole) -> Iterator[None]:
    """The worker stands still inside the block, and goes on after it."""
    (worker,) = deployed.deployment.of_role(role)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


FROM_PREFILL = (("prefill_first", "first"), ("decode_first", "second"))


@pytest.mark.parametrize("stage", ["first", "second"])
@pytest.mark.parametrize("strategy", RUN_BY_WORKERS)
def test_a_stage_that_stood_still_when_it_was_called_is_found_from_the_trace_alone(
    strategy: str, stage: str, deployed: Served
) -> None:
    ask(deployed)
    (first,), (second,) = deployed.first_stage, deployed.second_stage
    stands_still: ProcessRole = "prefill" if (strategy, stage) in FROM_PREFILL else "decode"
    has_token = Event()
    with ThreadPoolExecutor(1) as client:
        with stopped(deployed, stands_still):
            asked = client.submit(ask, deployed, 40, 4, has_token.set)
            if (strategy, stage) == ("prefill_first", "second"):
                # It is called when prefill has given the first token.
                assert has_token.wait(60)
            # That is the fault; nothing waits for anything here.
            time.sleep(STOPPED_SECONDS)
        trace = trace_of(deployed, asked.result(), *PREFILL, *DECODE)
    longest, milliseconds = trace.blame[0]
    assert longest.span.name == "dispatch"
    assert longest.worker == ("frontend" if stage == "first" else first.name)
    assert milliseconds > STOPPED_SECONDS * 1000 / 2
    if stage == "second":
        assert int(str(longest.span.attributes["instance"]), 16) == second.instance_id
