"""launch/slurm/deployment.sh as it is, on a node that is this machine: etcd, and a prefill worker of two ranks.

srun starts the ranks, and the embedded engine joins them.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.parity.answers import Answer, Question, ask
from tests.support.deployments import DEMO_CONFIGS, MODEL_NAME, demo_model, wait_until
from tests.support.fake_slurm import FakeSlurm
from trtllm_disagg.tools.up.orphan_reaper import MARK_VARIABLE, kill_marked, marked_processes
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.ports import free_http_port, free_system_ports

START_SECONDS = 150.0
STOP_SECONDS = 60.0
ONE_RANK = "tensor_parallel_size: 1"


@pytest.fixture
def mark() -> str:
    """Of everything that the job starts."""
    return uuid.uuid4().hex


@pytest.fixture
def engine_configs(tmp_path: Path) -> Path:
    """Of the demo, with two ranks for prefill."""
    directory = tmp_path / "configs"
    directory.mkdir()
    prefill, decode = ((DEMO_CONFIGS / f"{role}.yaml").read_text() for role in ("prefill", "decode"))
    assert ONE_RANK in prefill
    (directory / "prefill.yaml").write_text(prefill.replace(ONE_RANK, "tensor_parallel_size: 2"))
    (directory / "decode.yaml").write_text(decode)
    return directory


@pytest.fixture
def slurm(tmp_path: Path, mark: str) -> Iterator[FakeSlurm]:
    slurm = FakeSlurm(tmp_path / "bin", nodes="localhost", runs=True)
    slurm.program("etcd", f'#!/usr/bin/env bash\nexec {sysconfig.get_path("scripts")}/etcd "$@"\n')
    yield slurm
    kill_marked(mark)
    slurm.close()


def test_a_job_answers_with_ranks_that_srun_started(
    slurm: FakeSlurm, tmp_path: Path, mark: str, engine_configs: Path
) -> None:
    http_port = free_http_port(LOOPBACK, 0)
    # Two in a row each: of etcd and its peers, and of the workers.
    etcd_port, system_port = _two_ports(), _two_ports()
    job = slurm.start(
        "slurm/deployment.sh",
        "prefill_first",
        MODEL=str(demo_model()),
        SERVED_MODEL_NAME=MODEL_NAME,
        ENGINE="embedded",
        ENGINE_CONFIGS=str(engine_configs),
        PYTHON=sys.executable,
        HTTP_PORT=str(http_port),
        ETCD_PORT=str(etcd_port),
        HEAD_ADDRESS=LOOPBACK,
        FIRST_SYSTEM_PORT=str(system_port),
        DYN_TCP_RPC_HOST=LOOPBACK,
        DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS="0.2",
        TMPDIR=str(tmp_path),
        **{MARK_VARIABLE: mark},
    )
    url = f"http://{LOOPBACK}:{http_port}"

    def is_ready() -> bool:
        assert job.poll() is None, slurm.output
        try:
            for port in (system_port, system_port + 1):
                httpx.get(f"http://{LOOPBACK}:{port}/health").raise_for_status()
            return MODEL_NAME in httpx.get(f"{url}/v1/models").text
        except httpx.HTTPError:
            return False

    wait_until(is_ready, "the model is listed", START_SECONDS)
    prompts = (f"What is list {number}?" for number in count())
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:

        def is_answered_by_both() -> bool:
            """The prefill worker answers alone until it has found the other one."""
            message = {"role": "user", "content": next(prompts)}
            answer = ask(client, Question("chat", [message], {"max_tokens": 12}))
            assert isinstance(answer, Answer), answer
            assert answer.token_ids
            metrics = httpx.get(f"http://{LOOPBACK}:{system_port + 1}/metrics").text
            return bool(re.search(r"^trtllm_disagg_kv_pulls\S* [1-9]", metrics, re.MULTILINE))

        wait_until(is_answered_by_both, "the decode worker reads KV", START_SECONDS)
    steps = {call["argv"][-1].rpartition("/")[2]: call["argv"] for call in slurm.calls()}
    assert {"--mpi=pmi2", "--ntasks=2"} <= set(steps["prefill.sh"])

    job.terminate()
    assert job.wait(STOP_SECONDS) == 0, slurm.output
    # Both ranks were told to stop, and the first one needs the second while it drains.
    assert "the engine cannot go on" not in slurm.output
    wait_until(lambda: not marked_processes(mark), "everything has ended", STOP_SECONDS)


def _two_ports() -> int:
    """The first of two neighbours."""
    ports = free_system_ports(16)
    return next(port for port in ports if port + 1 in ports)
