"""When its TensorRT-LLM engine dies, a worker process says so and ends, although the engine never does."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.dynamo_deployment import DynamoDeployment
from tests.support.hard_worker import LOADS, NEVER_LOADS
from tests.support.models import write_checkpoint
from trtllm_disagg.engine.health import TIMES
from trtllm_disagg.processes.exits import ExitCode

#: For what a loaded machine adds.
MORE_SECONDS = 15.0


def test_a_worker_whose_engine_dies_ends_with_1_in_bounded_time(tmp_path: Path) -> None:
    deployment = DynamoDeployment(tmp_path)
    model = write_checkpoint(tmp_path / "model")
    worker = ["tests.support.hard_worker", "--model", str(model), "--engine", "tensorrt_llm"]
    try:
        deployment.start_workers({"agg": [*worker, "--disaggregation-mode", "agg"]})
        deployment.wait_until(lambda: "worker ready" in deployment.log("agg"), "ready", timeout=120)
        died = time.monotonic()
        deployment.send("agg", signal.SIGUSR1)
        deployment.wait_until(lambda: deployment.exit_code("agg") is not None, "it has ended", timeout=60)
        ended = time.monotonic() - died
    finally:
        deployment.stop()
    assert deployment.exit_code("agg") == 1, deployment.log("agg")
    assert ended < TIMES.between + TIMES.shutdown_dead + MORE_SECONDS
    said = deployment.log("agg")
    assert "the engine is dead: RuntimeError: rank 3 is gone" in said
    assert f"the engine has not ended within {TIMES.shutdown_dead:g} s" in said
    assert "error: the engine died: " in said
    assert "Traceback" not in said


def test_a_worker_whose_engine_dies_while_it_waits_for_the_other_stage_ends(tmp_path: Path) -> None:
    deployment = DynamoDeployment(tmp_path)
    model = write_checkpoint(tmp_path / "model")
    worker = ["tests.support.hard_worker", "--model", str(model), "--engine", "tensorrt_llm"]
    alone = ["--disaggregation-mode", "decode", "--on-missing-stage", "fail"]
    try:
        deployment.start_workers({"decode": [*worker, *alone]})
        waits = "waiting for the second stage"
        deployment.wait_until(lambda: waits in deployment.log("decode"), "it waits", timeout=120)
        deployment.send("decode", signal.SIGUSR1)
        deployment.wait_until(lambda: deployment.exit_code("decode") is not None, "it has ended", timeout=60)
    finally:
        deployment.stop()
    assert deployment.exit_code("decode") == 1, deployment.log("decode")
    assert "error: the engine died" in deployment.log("decode")


def test_ctrl_c_ends_a_worker_whose_engine_still_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NEVER_LOADS, "1")
    deployment = DynamoDeployment(tmp_path)
    model = write_checkpoint(tmp_path / "model")
    worker = ["tests.support.hard_worker", "--model", str(model), "--engine", "tensorrt_llm"]
    try:
        deployment.start_workers({"agg": [*worker, "--disaggregation-mode", "agg"]})
        deployment.wait_until(lambda: LOADS in deployment.log("agg"), "it loads", timeout=120)
        deployment.send("agg", signal.SIGINT)
        deployment.wait_until(lambda: deployment.exit_code("agg") is not None, "it has ended", timeout=60)
    finally:
        deployment.stop()
    assert deployment.exit_code("agg") == ExitCode.INTERRUPTED, deployment.log("agg")
    assert "Traceback" not in deployment.log("agg")
