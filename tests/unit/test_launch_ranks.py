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
#: Tells how many ranks a worker of a role has; as a worker it fails.
PYTHON = f"""#!{sys.executable} -P
import os, sys
words = sys.argv
if {{"trtllm_disagg.tools.up.for_scripts", "ranks"}} <= set(words):
    role = words[words.index("--disaggregation-mode") + 1]
    print(os.environ[role.upper() + "_NEEDS"])
elif "worker" in words:
    sys.exit(3)
else:
    os.execv({sys.executable!r}, [{sys.executable!r}, *words[1:]])
"""
TRTLLM = "yes pmix trtllm-llmapi-launch"
EMBEDDED = "no pmi2"
BEHIND = ["trtllm-llmapi-launch", str(LAUNCH / "all_or_none.sh")]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeSlurm]:
    made = FakeSlurm(tmp_path / "bin")
    made.program("python", PYTHON)
    yield made
    made.close()


def start(slurm: FakeSlurm, script: str, *args: str, **variables: str) -> Any:
    settings = {
        "PYTHON": str(slurm.directory / "python"),
        "MODEL": "m",
        "ENGINE": "tensorrt_llm",
        "GPUS_PER_NODE": "4",
        "ETCD_ENDPOINTS": "http://x:2379",
        "PREFILL_NEEDS": f"1 {TRTLLM}",
        "DECODE_NEEDS": f"2 {TRTLLM}",
        "AGG_NEEDS": f"8 {TRTLLM}",
    }
    return slurm.start(script, *args, **settings | variables)


def step(nodes: str, count: int, tasks: int, mpi: str, *command: str) -> list[str]:
    options = [
        "--overlap",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        f"--nodelist={nodes}",
        f"--nodes={count}",
    ]
    return [*options, f"--ntasks={tasks}", f"--ntasks-per-node={tasks // count}", f"--mpi={mpi}", *command]


def script(role: str) -> str:
    return str(LAUNCH / f"{role}.sh")


def test_a_worker_over_two_nodes_has_a_rank_for_each_gpu(slurm: FakeSlurm) -> None:
    start(slurm, "slurm/worker.sh", "agg", "--max-seq-len", "99", SRUN_ARGS="-A me --container-image=x.sqsh")
    (call,) = slurm.calls(count=1)
    all_gpus = ["env", "CUDA_VISIBLE_DEVICES=0,1,2,3", *BEHIND]
    expected = step("a,b", 2, 8, "pmix", "-A", "me", "--container-image=x.sqsh", *all_gpus, script("agg"))
    assert call["argv"] == [*expected, "--max-seq-len", "99"]
    assert call["environment"]["DYN_SYSTEM_PORT"] == "8081"
    assert call["environment"]["DYN_DISCOVERY_BACKEND"] == "etcd"


def test_a_worker_gets_the_gpus_that_are_named_for_its_role(slurm: FakeSlurm) -> None:
    start(slurm, "slurm/worker.sh", "decode", DECODE_CUDA_VISIBLE_DEVICES="2,3", DYN_SYSTEM_PORT="8090")
    (call,) = slurm.calls(count=1)
    assert call["argv"] == step(
        "a", 1, 2, "pmix", "env", "CUDA_VISIBLE_DEVICES=2,3", *BEHIND, script("decode")
    )
    assert call["environment"]["DYN_SYSTEM_PORT"] == "8090"


def test_a_deployment_places_each_worker_on_gpus_and_a_port_of_its_own(slurm: FakeSlurm) -> None:
    python = str(slurm.directory / "python")
    running = start(
        slurm,
        "slurm/deployment.sh",
        "prefill_first",
        PREFILL_WORKERS="3",
        DECODE_WORKERS="2",
        PYTHON="python-of-the-nodes",
        PLAN_PYTHON=python,
        PREFILL_CUDA_VISIBLE_DEVICES="7",
    )
    calls = slurm.calls(count=6)
    started = {call["environment"].get("DYN_SYSTEM_PORT", "frontend"): call["argv"] for call in calls}
    assert started == {
        "frontend": step("a", 1, 1, "none", str(LAUNCH / "frontend.sh")),
        **{
            str(8081 + n): step(
                "a", 1, 1, "pmix", "env", f"CUDA_VISIBLE_DEVICES={n}", *BEHIND, script("prefill")
            )
            for n in range(3)
        },
        "8084": step("b", 1, 2, "pmix", "env", "CUDA_VISIBLE_DEVICES=0,1", *BEHIND, script("decode")),
        "8085": step("b", 1, 2, "pmix", "env", "CUDA_VISIBLE_DEVICES=2,3", *BEHIND, script("decode")),
    }
    assert {call["environment"]["PYTHON"] for call in calls} == {"python-of-the-nodes"}
    assert "frontend http://a:8000 model=m strategy=prefill_first" in slurm.output
    running.terminate()
    assert running.wait(SECONDS) == 0


def test_embedded_workers_take_turns_on_the_nodes_and_get_their_transfer_host(slurm: FakeSlurm) -> None:
    start(
        slurm,
        "slurm/deployment.sh",
        "decode_first",
        ENGINE="embedded",
        GPUS_PER_NODE="",
        PREFILL_NEEDS=f"2 {EMBEDDED}",
        DECODE_NEEDS=f"1 {EMBEDDED}",
        TRTLLM_DISAGG_TRANSFER_KEY_FILE="key",
    )
    argvs = [call["argv"] for call in slurm.calls(count=3)]
    assert step("a", 1, 2, "pmi2", "env", "TRANSFER_HOST=a", script("prefill")) in argvs
    assert step("b", 1, 1, "pmi2", "env", "TRANSFER_HOST=b", script("decode")) in argvs


REFUSED = {
    "no job": ({"SLURM_JOB_NODELIST": ""}, (), "SLURM_JOB_NODELIST: not set"),
    "no engine": ({"ENGINE": ""}, (), "ENGINE: set it to tensorrt_llm or embedded"),
    "no model": ({"MODEL": ""}, (), "MODEL: set it"),
    "no gpus": ({"GPUS_PER_NODE": ""}, (), "GPUS_PER_NODE: '' is not allowed"),
    "too few nodes": ({"PREFILL_NEEDS": f"16 {TRTLLM}"}, (), "2 nodes with 4 GPUs each have no room for"),
    "no workers": ({"PREFILL_WORKERS": "0"}, (), "PREFILL_WORKERS: '0' is not allowed"),
    "files": (
        {"DYN_DISCOVERY_BACKEND": "file"},
        (),
        "DYN_DISCOVERY_BACKEND: 'file' is not allowed on 2 nodes",
    ),
    "no key": (
        {"PREFILL_NEEDS": f"1 {EMBEDDED}", "DECODE_NEEDS": f"1 {EMBEDDED}"},
        (),
        "TRTLLM_DISAGG_TRANSFER_KEY_FILE: not set",
    ),
    "a space": ({}, ("auto", "--override-engine-args", '{"a": 1}'), "splits its arguments again"),
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
def test_unknown_role_is_refused(slurm: FakeSlurm, launch: str) -> None:
    assert start(slurm, launch, "encode").wait(SECONDS) == 1
    assert "ROLE: 'encode' is not allowed; expected agg, prefill or decode" in slurm.output


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ("1,1", "CUDA_VISIBLE_DEVICES: '1,1' is not allowed; expected different GPUs"),
        (
            "3,4",
            "CUDA_VISIBLE_DEVICES: '3,4' is not allowed; expected GPUs from 0 to 3: a node has 4 of them",
        ),
    ],
)
def test_gpus_that_no_node_has_are_refused_before_srun_is_called(
    slurm: FakeSlurm, gpus: str, words: str
) -> None:
    refused = start(slurm, "slurm/worker.sh", "decode", DECODE_CUDA_VISIBLE_DEVICES=gpus)
    assert refused.wait(SECONDS) != 0
    assert words in slurm.output
    assert slurm.calls() == []


def test_gpus_may_be_named_by_their_uuid(slurm: FakeSlurm) -> None:
    start(slurm, "slurm/worker.sh", "prefill", PREFILL_CUDA_VISIBLE_DEVICES="GPU-8932f937")
    (call,) = slurm.calls(count=1)
    assert "CUDA_VISIBLE_DEVICES=GPU-8932f937" in call["argv"]


def test_sbatch_copy_of_deployment_sh_exits_1_and_names_wrap(slurm: FakeSlurm, tmp_path: Path) -> None:
    copied = tmp_path / "slurm_script"
    shutil.copy(LAUNCH / "slurm" / "deployment.sh", copied)
    assert slurm.start(copied).wait(SECONDS) == 1
    assert "sbatch --wrap" in slurm.output


def test_mpirun_starts_the_ranks_of_each_engine(slurm: FakeSlurm) -> None:
    assert start(slurm, "mpi.sh", "agg", MPIRUN_ARGS="-x A --hostfile h").wait(SECONDS) == 0
    embedded = {"AGG_NEEDS": f"2 {EMBEDDED}", "AGG_CUDA_VISIBLE_DEVICES": "5"}
    assert start(slurm, "mpi.sh", "agg", "--max-seq-len", "9", **embedded).wait(SECONDS) == 0
    on_trtllm, on_embedded = slurm.calls("mpirun")
    assert on_trtllm["argv"] == ["-n", "8", "-x", "A", "--hostfile", "h", *BEHIND, script("agg")]
    assert on_embedded["argv"] == ["-n", "2", script("agg"), "--max-seq-len", "9"]
    assert on_embedded["environment"]["CUDA_VISIBLE_DEVICES"] == "5"


def test_failed_worker_ends_the_launcher_of_its_ranks(slurm: FakeSlurm) -> None:
    slurm.program("mpirun", '#!/usr/bin/env bash\n"${@:3}"\n')
    failed = start(slurm, "mpi.sh", "agg")
    assert failed.wait(SECONDS) != 0, "the launcher waits for 10 minutes"
    assert "the worker ended with status 3; ending its ranks" in slurm.output
