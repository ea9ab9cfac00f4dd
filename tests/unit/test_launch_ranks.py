"""What launch/mpi.sh and launch/slurm/ start: argv and environment, with stand-ins for Slurm, MPI and Python."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import ROOT
from tests.support.fake_slurm import SECONDS, FakeSlurm

pytestmark = pytest.mark.process

LAUNCH = ROOT / "launch"
#: As a worker it fails.
PYTHON = f"""#!{sys.executable} -P
import os, sys
sys.exit(3) if "worker" in sys.argv else os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
"""
LAUNCHER = "trtllm-llmapi-launch"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    made = FakeSlurm(tmp_path / "bin")
    made.program("python", PYTHON)
    yield made
    made.close()


def start(slurm: FakeSlurm, script: str, *args: str, **variables: str) -> Any:
    """Variables such as PREFILL_NEEDS are lines of that role's engine config."""
    needs = {
        "AGG": "tensor_parallel_size: 4 # of\npipeline_parallel_size: 2",
        "DECODE": "tensor_parallel_size: 2",
    }
    for role in ("AGG", "PREFILL", "DECODE"):
        text = variables.pop(f"{role}_NEEDS", needs.get(role, "max_batch_size: 8"))
        (slurm.directory / f"{role.lower()}.yaml").write_text(text + "\n")
    settings = {
        "PYTHON": str(slurm.directory / "python"),
        "MODEL": "m",
        "ENGINE": "tensorrt_llm",
        "ENGINE_CONFIGS": str(slurm.directory),
        "GPUS_PER_NODE": "4",
        "ETCD_ENDPOINTS": "http://x:2379",
        "NODES": "a",
    }
    return slurm.start(script, *args, **settings | variables)


def step(nodes: str, tasks: int, mpi: str, *command: str) -> list[str]:
    count = nodes.count(",") + 1
    options = [
        "--overlap",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        f"--nodelist={nodes}",
        f"--nodes={count}",
    ]
    return [*options, f"--ntasks={tasks}", f"--ntasks-per-node={tasks // count}", f"--mpi={mpi}", *command]


def worker(role: str, gpus: str) -> list[str]:
    script = f"{role}_worker" if role == "agg" else role
    return ["env", f"CUDA_VISIBLE_DEVICES={gpus}", LAUNCHER, str(LAUNCH / f"{script}.sh")]


def test_a_worker_over_two_nodes_has_a_rank_for_each_gpu(slurm: FakeSlurm) -> None:
    gpus = {"AGG_CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    start(
        slurm, "slurm/worker.sh", "agg", "--max-seq-len", "99", NODES="a,b", SRUN_ARGS="-A me --x=y", **gpus
    )
    (call,) = slurm.calls(count=1)
    expected = step("a,b", 8, "pmix", "-A", "me", "--x=y", *worker("agg", "0,1,2,3"))
    assert call["argv"] == [*expected, "--max-seq-len", "99"]


def test_a_deployment_places_each_worker_on_gpus_and_a_port_of_its_own(slurm: FakeSlurm) -> None:
    running = start(
        slurm,
        "slurm/deployment.sh",
        "prefill_first",
        PREFILL_WORKERS="3",
        DECODE_WORKERS="2",
        PYTHON="python-of-the-nodes",
        PLAN_PYTHON=str(slurm.directory / "python"),
        PREFILL_CUDA_VISIBLE_DEVICES="7",
    )
    calls = slurm.calls(count=6)
    ports = {call["environment"].get("DYN_SYSTEM_PORT"): call["argv"] for call in calls}
    assert ports.pop(None)[-2:] == ["--mpi=none", str(LAUNCH / "frontend.sh")]
    assert ports == {
        **{str(8081 + n): step("a", 1, "pmix", *worker("prefill", str(n))) for n in range(3)},
        "8084": step("b", 2, "pmix", *worker("decode", "0,1")),
        "8085": step("b", 2, "pmix", *worker("decode", "2,3")),
    }
    assert {call["environment"]["PYTHON"] for call in calls} == {"python-of-the-nodes"}
    assert "frontend http://a:8000 model=m strategy=prefill_first" in slurm.output
    running.terminate()
    assert running.wait(SECONDS) == 0


def test_a_worker_larger_than_a_node_has_nodes_of_its_own(slurm: FakeSlurm) -> None:
    slurm.nodes = "a,b,c"
    start(slurm, "slurm/deployment.sh", "auto", DECODE_NEEDS="tensor_parallel_size: 8")
    argvs = [call["argv"] for call in slurm.calls(count=3)]
    assert step("a", 1, "pmix", *worker("prefill", "0")) in argvs
    assert step("b,c", 8, "pmix", *worker("decode", "0,1,2,3")) in argvs


def test_embedded_workers_are_on_one_node_without_gpus(slurm: FakeSlurm) -> None:
    slurm.nodes = "a"
    start(slurm, "slurm/deployment.sh", "agg", ENGINE="embedded", GPUS_PER_NODE="", AGG_WORKERS="2")
    argvs = [call["argv"] for call in slurm.calls(count=3)]
    assert argvs.count(step("a", 8, "pmi2", "env", str(LAUNCH / "agg_worker.sh"))) == 2


REFUSED = {
    "no job": ({"SLURM_JOB_NODELIST": ""}, (), "SLURM_JOB_NODELIST: no nodes"),
    "no engine": ({"ENGINE": ""}, (), "ENGINE: '' is not allowed; expected tensorrt_llm or embedded"),
    "no gpus": ({"GPUS_PER_NODE": ""}, (), "GPUS_PER_NODE: '' is not allowed"),
    "no configs": ({"ENGINE_CONFIGS": "/none"}, (), "/none/prefill.yaml"),
    "too few nodes": (
        {"PREFILL_NEEDS": "tensor_parallel_size: 16"},
        (),
        "2 nodes of 4 GPUs have no room for prefill workers of 16 ranks",
    ),
    "files": ({"DYN_DISCOVERY_BACKEND": "file"}, (), "DYN_DISCOVERY_BACKEND=file are for one node"),
    "embedded": ({"ENGINE": "embedded"}, (), "ENGINE=embedded and"),
    "a limit of up": ({"STOP_TIMEOUT": "60"}, (), "STOP_TIMEOUT is for agg.sh and disagg.sh"),
    "a space": ({}, ("auto", "--override-engine-args", '{"a": 1}'), "splits its arguments again"),
    "an empty one": ({}, ("auto", "--served-model-name", ""), "splits its arguments again"),
    "a strategy": ({}, ("sideways",), "STRATEGY: 'sideways' is not allowed"),
    "no address": (
        {"ETCD_ENDPOINTS": "", "SLURM_JOB_NODELIST": "localhost,b"},
        (),
        "HEAD_ADDRESS: set it to an address of localhost",
    ),
}


@pytest.mark.parametrize(("variables", "args", "words"), REFUSED.values(), ids=REFUSED)
def test_impossible_slurm_job_is_refused_before_srun_is_called(
    slurm: FakeSlurm, variables: dict[str, str], args: tuple[str, ...], words: str
) -> None:
    refused = start(slurm, "slurm/deployment.sh", *args, **variables)
    assert refused.wait(SECONDS) != 0
    assert words in slurm.output
    assert slurm.calls() == []


@pytest.mark.parametrize("launch", ["slurm/worker.sh", "mpi.sh"])
@pytest.mark.parametrize("role", ["encode", ""])
def test_unknown_role_is_refused(slurm: FakeSlurm, launch: str, role: str) -> None:
    assert start(slurm, launch, role).wait(SECONDS) == 1
    assert f"ROLE: '{role}' is not allowed; expected agg, prefill or decode" in slurm.output


def test_sbatch_copy_of_deployment_sh_exits_1_and_names_wrap(slurm: FakeSlurm, tmp_path: Path) -> None:
    copied = tmp_path / "slurm_script"
    shutil.copy(LAUNCH / "slurm" / "deployment.sh", copied)
    assert slurm.start(copied).wait(SECONDS) == 1
    assert "sbatch --wrap" in slurm.output


def test_mpirun_starts_the_ranks_of_each_engine(slurm: FakeSlurm) -> None:
    assert start(slurm, "mpi.sh", "agg", MPIRUN_ARGS="-x A --hostfile h").wait(SECONDS) == 0
    embedded = {"ENGINE": "embedded", "DECODE_CUDA_VISIBLE_DEVICES": "5"}
    assert start(slurm, "mpi.sh", "decode", "--max-seq-len", "9", **embedded).wait(SECONDS) == 0
    on_trtllm, on_embedded = slurm.calls("mpirun")
    script = str(LAUNCH / "agg_worker.sh")
    assert on_trtllm["argv"] == ["-n", "8", "-x", "A", "--hostfile", "h", LAUNCHER, script]
    assert on_embedded["argv"] == ["-n", "2", str(LAUNCH / "decode.sh"), "--max-seq-len", "9"]
    assert on_embedded["environment"]["CUDA_VISIBLE_DEVICES"] == "5"


def test_failed_worker_ends_the_launcher_of_its_ranks(slurm: FakeSlurm) -> None:
    slurm.program("mpirun", '#!/usr/bin/env bash\n"${@:3}"\n')
    failed = start(slurm, "mpi.sh", "agg")
    assert failed.wait(SECONDS) != 0, "the launcher waits for 10 minutes"
    assert "the worker ended with status 3; ending its ranks" in slurm.output
