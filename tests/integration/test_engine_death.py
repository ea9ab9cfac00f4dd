"""When its TensorRT-LLM engine dies, a worker process says so and ends, although the engine never does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.dynamo_deployment import DynamoDeployment
from tests.support.hard_worker import LOADS, NEVER_LOADS
from tests.support.models import write_checkpoint
from trtllm_disagg.common.machine import birth
from trtllm_disagg.engine.health import TIMES

#: From an engine's death to the end of its worker; and what a loaded machine may add.
MAX_SECONDS, MORE_SECONDS = 5.0, 15.0

Start = Callable[[str, str, str], DynamoDeployment]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A worker of this name with these flags, until its log says this."""
    deployment = DynamoDeployment(tmp_path)
    worker = ["tests.support.hard_worker", "--model", str(write_checkpoint(tmp_path / "model"))]

    def start(name: str, flags: str, said: str) -> DynamoDeployment:
        command = [*worker, "--engine", "tensorrt_llm", "--disaggregation-mode", name, *flags.split()]
        deployment.start_workers({name: command})
        deployment.wait_until(lambda: said in deployment.log(name), said, timeout=120)
        return deployment

    yield start
    deployment.stop()


def ended(deployment: DynamoDeployment, name: str, number: signal.Signals) -> str:
    """The log of a worker that this signal has ended."""
    deployment.send(name, number)
    deployment.wait_until(lambda: deployment.exit_code(name) is not None, "it has ended", timeout=60)
    said = deployment.log(name)
    assert deployment.exit_code(name) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, 1), said
    assert "Traceback" not in said
    return said


def test_a_worker_whose_engine_dies_ends_with_1_in_bounded_time(start: Start) -> None:
    deployment = start("agg", "", "worker ready")
    died = time.monotonic()
    said = ended(deployment, "agg", signal.SIGUSR1)
    assert time.monotonic() - died < MAX_SECONDS + MORE_SECONDS
    assert "the engine is dead: RuntimeError: rank 3 is gone" in said
    assert f"the engine has not ended within {TIMES.shutdown_dead:g} s" in said
    assert "error: the engine died: " in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_worker_whose_engine_still_loads_and_all_ranks(
    start: Start, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv(NEVER_LOADS, "1")
    deployment = start("agg", "", LOADS)
    ranks = [int(pid) for pid in deployment.log("agg").partition(LOADS)[2].split()[:2]]
    try:
        assert len([pid for pid in ranks if birth(pid)]) == 2
        ended(deployment, "agg", number)
        deployment.wait_until(lambda: not any(map(birth, ranks)), "the ranks have ended")
    finally:
        for pid in filter(birth, ranks):
            os.kill(pid, signal.SIGKILL)
