"""The process of a worker: what it refuses before it loads anything, what it says of its engine, and how it ends."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from tests.conftest import Checkpoints
from tests.support.packages import install
from tests.support.recording_pair import recording_engine
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.config.args import add_worker_arguments
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engines.embedded.tensor_parallel.launch import mpiexec
from trtllm_disagg.errors import ConfigError, EngineLostError
from trtllm_disagg.worker import worker_command
from trtllm_disagg.worker.process import WorkerProcess, served_model

#: Says what is done at its end, in order.
ENDING = """
import atexit, sys
if "mpi" in sys.argv:
    from mpi4py import MPI
from trtllm_disagg.worker.worker_command import ExitStatus

class Late:
    def __del__(self):
        print("taken apart", flush=True)

late = Late()
status = ExitStatus()
atexit.register(print, "exit handler")
status.value = 3
if "raise" in sys.argv:
    raise RuntimeError("a bug")
"""


def end(program: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python("-c", program, *argv), capture_output=True, text=True, check=False, timeout=30
    )


needs_mpi = pytest.mark.skipif(find_spec("mpi4py") is None, reason="the extra mpi is not installed")


@pytest.mark.parametrize(
    "argv", [[], ["raise"], *(pytest.param(["mpi", *more], marks=needs_mpi) for more in ([], ["raise"]))]
)
def test_a_worker_ends_with_its_status_before_python_is_taken_apart(argv: list[str]) -> None:
    """Also where MPI is imported, as TensorRT-LLM does for one process, too."""
    done = end(ENDING, *argv)
    assert (done.returncode, done.stdout) == (3, "exit handler\n")
    assert ("RuntimeError: a bug" in done.stderr) is ("raise" in argv)


@needs_mpi
def test_a_worker_in_a_job_of_two_leaves_its_end_to_mpi() -> None:
    ranks = [str(mpiexec()), "-n", "2", *python("-c", ENDING, "mpi")]
    done = subprocess.run(ranks, capture_output=True, text=True, check=False, timeout=120)
    assert [done.stdout.count(words) for words in ("exit handler", "taken apart")] == [2, 2]


#: mpi4py.MPI as TensorRT-LLM's: a job of one; its Finalize waits for ever and holds Python's lock.
WAITS = """
import ctypes, sys
from types import SimpleNamespace
sys.modules["mpi4py.MPI"] = SimpleNamespace(
    Is_initialized=lambda: True,
    Is_finalized=lambda: False,
    COMM_WORLD=SimpleNamespace(size=1),
    Finalize=ctypes.PyDLL(None).pause,
)
from trtllm_disagg.engine import mpi_start
mpi_start.SECONDS_OF_FINALIZE = 1
"""


@pytest.mark.parametrize("argv", [[], ["raise"]])
def test_a_worker_whose_mpi_waits_at_its_end_ends_with_its_status_after_the_deadline(argv: list[str]) -> None:
    started = time.monotonic()
    done = end(WAITS + ENDING, *argv)
    assert (done.returncode, done.stdout) == (3, "exit handler\n")
    assert time.monotonic() - started > 1


#: A worker that has lost its engine, with a thread of it that never ends, as those of MPI. TensorRT-LLM registers the
#: engine's shutdown as an exit handler.
LOST = """
import argparse, atexit, sys, threading
from unittest.mock import patch
from trtllm_disagg.worker import worker, worker_command
from trtllm_disagg.config.args import add_worker_arguments
from trtllm_disagg.errors import ConfigError, EngineLostError

async def lost(*_):
    threading.Thread(target=threading.Event().wait).start()
    atexit.register(threading.Event().wait)
    if "refused" not in sys.argv:
        raise EngineLostError("the engine died: rank 3 is gone")
    try:
        raise ConfigError("the pair does not fit")
    finally:
        raise EngineLostError("the engine does not end")

parser = argparse.ArgumentParser()
add_worker_arguments(parser)
with patch.object(worker, "run_worker", lost), patch.object(
    worker_command, "servable_model", lambda model, revision: model
):
    worker_command.run(parser.parse_args(["--model", "org/model", "--engine", "recording", "--frozen-seconds", "0"]))
"""


@pytest.mark.parametrize(
    ("argv", "code", "errors"),
    [
        ([], 1, ["error: the engine died: rank 3 is gone"]),
        (
            ["refused"],
            ExitCode.WRONG_SETTING,
            ["error: the engine does not end", "error: the pair does not fit"],
        ),
    ],
)
def test_a_worker_that_has_lost_its_engine_ends_whatever_its_threads_do(
    argv: list[str], code: int, errors: list[str]
) -> None:
    done = end(LOST, *argv)
    assert done.returncode == code
    assert done.stderr.splitlines()[-len(errors) :] == errors


SEED, THREADS = "PYTHONHASHSEED", "OMP_NUM_THREADS"


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("tensorrt_llm", {}, {SEED: "0"}),
        ("tensorrt_llm", {SEED: "42", THREADS: "8"}, {SEED: "42", THREADS: "8"}),
        ("recording", {}, {THREADS: "1"}),
        ("recording", {THREADS: "8"}, {THREADS: "8"}),
    ],
)
def test_tensorrt_llms_ranks_have_one_hash_seed_and_only_other_engines_have_one_thread(
    engine: str,
    given: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tensorrt_llm: ModuleType,
) -> None:
    """As under Dynamo's own worker. Ranks inherit it, and weights are loaded with all cores."""
    for name in (SEED, THREADS):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(worker_command, "servable_model", lambda model, revision: model)
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    worker_command.read_settings(parser.parse_args(["--model", "org/model", "--engine", engine]))
    assert {name: os.environ[name] for name in (SEED, THREADS) if name in os.environ} == expected


def test_a_worker_with_two_mpis_ends_before_tensorrt_llm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "mpich", "tensorrt_llm")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker_command, "servable_model", lambda model, revision: model)
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    with pytest.raises(ConfigError, match="mpich is installed beside TensorRT-LLM"):
        worker_command.read_settings(parser.parse_args(["--model", "org/model", "--engine", "tensorrt_llm"]))


def process(death: str | None = None) -> WorkerProcess:
    engine = recording_engine()
    if death is not None:
        engine.die(death)
    of_process = cast(Any, None)
    config = WorkerConfig(model="m")
    return WorkerProcess(config, {}, of_process, of_process, of_process, of_process, engine=engine)


@pytest.mark.parametrize("error", [None, ConnectionError("the runtime is shut down")])
def test_the_death_of_the_engine_is_the_reason_also_if_another_step_fails_of_it(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineLostError, match="the engine died: rank 3 is gone"):
        process("rank 3 is gone").require_engine(error)
    assert ("the runtime is shut down" in caplog.text) is (error is not None)


def test_an_error_of_a_worker_with_a_living_engine_stays() -> None:
    process().require_engine(ConnectionError("no discovery"))


@pytest.mark.parametrize(
    ("engine_name", "given", "seconds"),
    [
        ("tensorrt_llm", None, 120 + 30 + 16),
        ("embedded", None, 0.0),
        ("embedded", 9.0, 9.0),
        ("tensorrt_llm", 9.0, 9.0),
        ("tensorrt_llm", 0.0, 0.0),
    ],
)
def test_stall_timeout_follows_from_tensorrt_llms_arguments_unless_it_is_given(
    engine_name: str, given: float | None, seconds: float
) -> None:
    config = WorkerConfig(model="org/model", engine=engine_name, engine_stall_timeout=given)
    args = {"max_seq_len": 16_000, "cache_transceiver_config": {"kv_transfer_timeout_ms": 30_000}}
    of_process = cast(Any, None)
    made = WorkerProcess(config, args, of_process, of_process, of_process, of_process)
    assert made.stall_seconds == seconds


# -- a model that cannot be served


#: What it takes to say what is wrong with a model.
CHECK = """
import sys
from trtllm_disagg.common.cli import main
try:
    main(["worker", "--engine", "embedded", "--model", sys.argv[1], "--override-engine-args", '{"dtype": "float33"}'])
finally:
    print(*(name for name in ("torch", "transformers", "dynamo", "uvloop") if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.process
def test_model_that_cannot_be_served_is_refused_before_torch_is_imported(checkpoints: Checkpoints) -> None:
    error, heavy = end(CHECK, str(checkpoints())).stderr.splitlines()
    assert error.startswith("error: dtype: 'float33' is not allowed")
    assert heavy == ""


# -- what it says of its engine's KV cache


@pytest.mark.parametrize(
    ("capacity", "block_size", "num_blocks"),
    [({"tokensPerBlock": 64, "maxNumBlocks": 9, "maxNumTokens": 576}, 64, 9), ({}, 128, 0)],
    ids=["reported", "not-reported"],
)
def test_block_size_without_a_reported_capacity_is_that_of_the_engines_arguments(
    capacity: dict[str, Any], block_size: int, num_blocks: int
) -> None:
    """TensorRT-LLM sets it for some models, if nothing else does."""
    engine = recording_engine()
    engine.llm.args.kv_cache_config.tokens_per_block = 128
    engine.llm.get_kv_cache_capacity = lambda: capacity
    model = served_model(WorkerConfig(model="org/model", kv_block_size=16), engine)
    assert (model.block_size, model.num_blocks) == (block_size, num_blocks)


def test_variables_beside_the_engine_arguments_are_the_engines_unless_they_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensorrt_llm: ModuleType
) -> None:
    (tmp_path / "agg.yaml").write_text("max_seq_len: 99\n")
    (tmp_path / "worker.env").write_text("# Why.\nTRTLLM_ENABLE_PDL=1\n\nNCCL_CUMEM_ENABLE=0\nNCCL_NET=\n")
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"NCCL_CUMEM_ENABLE": "1"})
    monkeypatch.setattr(worker_command, "servable_model", lambda model, revision: model)
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    words = [
        "--model",
        "org/model",
        "--engine",
        "tensorrt_llm",
        "--extra-engine-args",
        f"{tmp_path}/agg.yaml",
    ]
    worker_command.read_settings(parser.parse_args(words))
    given = {name: os.environ[name] for name in ("TRTLLM_ENABLE_PDL", "NCCL_CUMEM_ENABLE", "NCCL_NET")}
    assert given == {"TRTLLM_ENABLE_PDL": "1", "NCCL_CUMEM_ENABLE": "1", "NCCL_NET": ""}
