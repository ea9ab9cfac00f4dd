"""With Dynamo's own variables a request is one trace: the frontend's spans, and those of both workers below them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.support.deployments import demo_config, served, wait_until
from tests.support.tracing import Collector, collecting
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.trace.reading import Node, Trace

#: Seconds that an answer takes, of which what no span of ours covers is a small part on any machine.
TOKENS, STEP_SECONDS = 60, 0.05
LEAST_COVERED = 0.95
FRONTEND = "http-request"


def trace_of(collector: Collector) -> Trace | None:
    """Of the one request, when the frontend and all workers have exported theirs."""
    for trace in collector.traces():
        names = [node.span.name for node in trace.nodes]
        if FRONTEND in names:
            return trace
    return None


def covered(nodes: list[Node], start: int, end: int) -> float:
    """The share of a time that spans are in."""
    total, until = 0, start
    for node in sorted(nodes, key=lambda each: each.span.start):
        begin, last = max(node.span.start, until), min(node.span.end, end)
        total += max(0, last - begin)
        until = max(until, last)
    return total / (end - start)


def test_a_request_is_one_trace_over_frontend_and_workers(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = tmp_path / "engine.yaml"
    pace.write_text(json.dumps({"recording": {"step_seconds": STEP_SECONDS}}))
    config = demo_config(
        "decode_first",
        tmp_path / "run",
        engine="recording",
        model=str(checkpoints("llama")),
        engine_configs=dict.fromkeys(spec_of("decode_first").roles, pace),
    )
    with collecting(tmp_path / "collected.jsonl") as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with served(config) as deployed:
            answer = deployed.openai.completions.create(
                model=config.served_model_name,
                prompt=[5, 6, 7, 8],
                max_tokens=TOKENS,
                extra_body={"ignore_eos": True},
            )
            wait_until(lambda: trace_of(collector) is not None, "the frontend has exported the request")
        # What was still in a worker is exported when it ends.
        trace = trace_of(collector)

    assert trace is not None
    assert trace.request_ids == [answer.id.removeprefix("cmpl-")]
    assert [node.span.name for node in trace.roots] == [FRONTEND]
    ours = [node for node in trace.nodes if node.is_ours]
    workers = {node.worker.partition("-")[0] for node in ours}
    assert workers == {"prefill", "decode"}
    (request,) = (node for node in ours if node.span.name == "request")
    frontend = trace.roots[0].span
    assert covered(request.children, frontend.start, frontend.end) >= LEAST_COVERED
