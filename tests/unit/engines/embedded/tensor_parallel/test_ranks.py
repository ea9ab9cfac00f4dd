"""The processes of tensor parallelism: started, asleep when idle, gone together; and what is refused beforehand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.deployments import wait_until
from trtllm_disagg.engine.rank_placement import num_ranks_of
from trtllm_disagg.engines.embedded import LLM, RequestError, SamplingParams
from trtllm_disagg.engines.embedded.tensor_parallel.launch import RankWatch, core_launch, require_ranks
from trtllm_disagg.errors import ConfigError

MPIEXEC = str(Path(sysconfig.get_path("scripts")) / "mpiexec")
PROMPT = [2 + i % 200 for i in range(40)]
_SECONDS = 60
SHARED_BEFORE = set(Path("/dev/shm").glob("mpich_shm_*"))
#: A script that serves with two ranks until it is killed or has nothing left to do.
SERVE = """
import sys, time
from trtllm_disagg.engines.embedded import LLM, SamplingParams
with LLM(model=sys.argv[1], tensor_parallel_size=int(sys.argv[2]), skip_tokenizer_init=True, max_seq_len=128,
         kv_cache_config={"max_tokens": 256}) as llm:
    answer = llm.generate([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True, end_id=1))
    print("answer", *answer.outputs[0].token_ids, "pids", *llm.engine_pids, flush=True)
    if sys.argv[3:] == ["stay"]:
        time.sleep(600)
"""


def two_ranks(model: Path, **more: Any) -> LLM:
    return LLM(
        model=model,
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        max_seq_len=2048,
        kv_cache_config={"max_tokens": 4096},
        **more,
    )


def test_two_ranks_share_each_request_whatever_attention_dp_says(checkpoints: Checkpoints) -> None:
    with two_ranks(checkpoints(), enable_attention_dp=True) as llm:
        assert num_ranks_of(llm.args) == 1


def test_prompt_logprobs_of_two_ranks_equal_those_of_one(checkpoints: Checkpoints) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, ignore_eos=True, end_id=1)
    prompt = [5 + i % 200 for i in range(300)]
    with two_ranks(checkpoints()) as llm:
        by_two = llm.generate(prompt, params).outputs[0].prompt_logprobs
    with LLM(model=checkpoints(), skip_tokenizer_init=True, max_seq_len=2048) as llm:
        by_one = llm.generate(prompt, params).outputs[0].prompt_logprobs
    assert len(by_two) == len(prompt)
    assert by_two == by_one


def processes(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids]


def used_in_a_second(ranks: list[psutil.Process]) -> list[float]:
    """Seconds of CPU."""
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    time.sleep(1)
    return [sum(rank.cpu_times()[:2]) - start for rank, start in zip(ranks, before, strict=True)]


def assert_gone(ranks: list[psutil.Process]) -> None:
    """And nothing of mpich is left where files stay; ranks of a test beside this one have theirs until they joined."""
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    left = set(Path("/dev/shm").glob("mpich_shm_*")) - SHARED_BEFORE
    assert {file for file in left if not is_mapped(file)} == set()


def is_mapped(file: Path) -> bool:
    """By any process: one maps mpich's memory until it ends."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(file) in maps.read_text():
                return True
    return False


def test_idle_ranks_sleep_a_stopped_one_may_go_on_and_a_killed_one_ends_all_requests(
    checkpoints: Checkpoints,
) -> None:
    with two_ranks(checkpoints()) as llm:
        ranks = processes(llm.engine_pids)
        assert len(ranks) == 2
        assert llm.engine_pid == llm.engine_pids[0]
        started = ranks[1].parents()[:2]  # hydra's proxy and mpiexec
        llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True, end_id=1))

        # Once a second has passed, an engine with nothing to do gives memory back, which takes time of its own.
        wait_until(lambda: max(used_in_a_second(ranks)) < 0.1, "a second in which no rank computes")

        # Stopped for a moment only: it goes on.
        result = llm.generate_async(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, end_id=1))
        ranks[1].suspend()
        time.sleep(1.5)
        ranks[1].resume()
        assert len(result.result(timeout=_SECONDS).outputs[0].token_ids) == 20

        long = SamplingParams(max_tokens=1900, ignore_eos=True, end_id=1)
        results = [llm.generate_async(PROMPT, long) for _ in range(3)]
        ranks[1].kill()
        # mpiexec ends rank 0 then, which may be before it has told; the worker knows which was the first.
        told = rf"rank 1 of the engine \(process {ranks[1].pid}\) died"
        for result in results:
            with pytest.raises(RequestError, match=told):
                result.result(timeout=_SECONDS)
        assert_gone([*ranks, *started])
        assert not llm._check_health()
        with pytest.raises(RuntimeError, match=told):
            llm.generate_async(PROMPT)


def test_a_killed_engine_core_takes_its_ranks_along(checkpoints: Checkpoints) -> None:
    with two_ranks(checkpoints()) as llm:
        ranks = processes(llm.engine_pids)
        result = llm.generate_async(PROMPT, SamplingParams(max_tokens=1900, ignore_eos=True, end_id=1))
        os.kill(llm.engine_pid, signal.SIGKILL)
        # The kernel may end rank 1 with its parent before it says that rank 0 has ended.
        with pytest.raises(RequestError, match=r"rank [01] of the engine \(process \d+\) died"):
            result.result(timeout=_SECONDS)
        assert_gone(ranks)


def test_the_rank_that_died_first_is_named_although_all_are_dead_when_it_is_asked() -> None:
    ranks = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    pids = [rank.pid for rank in ranks]
    with contextlib.closing(RankWatch(pids)) as watch:
        assert watch.first_to_end() is None
        for rank in (ranks[1], ranks[0], ranks[2]):
            rank.kill()
            rank.wait(timeout=_SECONDS)
        assert watch.first_to_end() == f"rank 1 of the engine (process {pids[1]}) died"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_engine_with_the_cause(checkpoints: Checkpoints, rank: int) -> None:
    """It is not dead; without a word the other one would wait for it in the middle of a step, for ever."""
    with two_ranks(checkpoints()) as llm:
        ranks = processes(llm.engine_pids)
        started = ranks[1].parents()[:2]
        result = llm.generate_async(PROMPT, SamplingParams(max_tokens=1900, ignore_eos=True, end_id=1))
        ranks[rank].suspend()
        with pytest.raises(RequestError, match=rf"rank {rank} of the engine .* has been stopped"):
            result.result(timeout=_SECONDS)
        assert_gone([*ranks, *started])


def test_a_killed_worker_leaves_no_rank_behind_not_even_a_stopped_one(checkpoints: Checkpoints) -> None:
    command = [sys.executable, "-c", SERVE, str(checkpoints()), "2", "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        _, _, pids = worker.stdout.readline().partition("pids")
        ranks = processes([int(pid) for pid in pids.split()])
        ranks[1].suspend()
        worker.kill()
    assert len(ranks) == 2
    assert_gone(ranks)


def test_ranks_started_by_mpiexec_serve_together(checkpoints: Checkpoints) -> None:
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", SERVE, str(checkpoints()), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode == 0, done.stderr
    answers = [line.split()[1:7] for line in done.stdout.splitlines() if line.startswith("answer")]
    alone = Core(checkpoints())
    expected = alone.generate([5, 6, 7], 6)
    alone.close()
    assert answers == [[str(token) for token in expected]], "only rank 0 answers"


def test_a_job_of_another_size_is_refused_on_every_rank(checkpoints: Checkpoints) -> None:
    command = [
        MPIEXEC,
        "-disable-auto-cleanup",
        "-n",
        "3",
        sys.executable,
        "-c",
        SERVE,
        str(checkpoints()),
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    assert done.returncode != 0
    assert done.stderr.count("ConfigError: tensor_parallel_size: 2 is not allowed; expected 3") == 3, (
        done.stderr
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "tensor_parallel_size: 2 is not allowed; expected 1"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "use mpich's mpiexec, not Open MPI's"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "use srun --mpi=pmi2"),
    ],
)
def test_launchers_that_cannot_be_joined_are_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_ranks(2, environment)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_engine_process_gets_huge_pages_unless_glibc_tunables_decides(given: str, expected: str) -> None:
    assert core_launch(1, 1, {"GLIBC_TUNABLES": given}).environment["GLIBC_TUNABLES"] == expected


def test_threads_of_an_engine_wait_briefly_before_they_sleep() -> None:
    environment = core_launch(1, 2, {"OMP_WAIT_POLICY": "ACTIVE"}).environment
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(environment["GOMP_SPINCOUNT"]) <= 1000


def test_one_rank_needs_no_mpi() -> None:
    assert "mpiexec" not in core_launch(1, 1, {}).command[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_size": 4},
            "tensor_parallel_size: 4 is not allowed; expected a divisor of the model's 2 KV heads",
        ),
        (
            {"tensor_parallel_size": 2, "embedded": {"device": "cuda"}},
            "embedded.device: 'cuda' is not allowed; expected cpu, with tensor_parallel_size above 1",
        ),
    ],
)
def test_sizes_that_ranks_cannot_divide_are_refused_before_anything_is_built(
    settings: dict[str, Any], message: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing is started
    with pytest.raises(ConfigError, match=message):
        LLM(model=checkpoints(), skip_tokenizer_init=True, **settings)
