"""Conditional disaggregation on a running deployment: by length, by what is cached, and by thresholds that change."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.answers import Answer, Question, ask
from tests.parity.cases import ids
from tests.parity.conftest import oracle  # noqa: F401 - a fixture
from tests.parity.oracle import Oracle
from tests.support.deployments import WORKER_SIDE, Served, demo_config, served, wait_until

BLOCK = 16
LIMIT = 100


@pytest.fixture(scope="module", params=WORKER_SIDE)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path]]:
    order: str = request.param
    directory = tmp_path_factory.mktemp(order)
    policy = directory / "policy.yaml"
    policy.write_text(f"max_local_prefill_length: {LIMIT}\n")
    arguments = ("--prefill-decider", "length_and_queue", "--policy-file", str(policy))
    with served(demo_config(order, directory / "run", worker_args=arguments)) as deployment:
        yield deployment, policy


def took(deployment: Served, oracle: Oracle, prompt: list[int], salt: str) -> tuple[str, str]:  # noqa: F811
    """(strategy, reason), of an answer that is the engine's own."""
    question = Question("completions", prompt, {"max_tokens": 6, "ignore_eos": True}, salt=salt)
    answer = ask(deployment.openai, question)
    assert isinstance(answer, Answer), answer
    right = oracle.answer(question)
    assert (answer.token_ids, answer.finish_reason) == (right.token_ids, right.finish_reason)
    return answer.told["strategy"], answer.told["reason"]


def test_cached_tokens_do_not_count_as_prompt_length(deployment: tuple[Served, Path], oracle: Oracle) -> None:  # noqa: F811
    served, _ = deployment
    prompt = ids(4 * LIMIT, seed=77)
    assert took(served, oracle, prompt, "cached") == (served.strategy, "long")
    # The engine tells of its blocks a moment later.
    wait_until(
        lambda: took(served, oracle, prompt, "cached") == ("local", "short"), "the prompt counts as cached"
    )
    assert took(served, oracle, prompt, "another-tenant")[1] == "long"


def test_a_threshold_changes_without_a_restart(deployment: tuple[Served, Path], oracle: Oracle) -> None:  # noqa: F811
    served, policy = deployment
    (worker,) = served.first_stage
    asked = iter(range(10_000))

    def reason() -> str:
        number = next(asked)
        return took(served, oracle, ids(60, seed=1000 + number), f"change-{number}")[1]

    def write(content: str) -> None:
        policy.with_suffix(".new").write_text(content)
        os.replace(policy.with_suffix(".new"), policy)

    assert reason() == "short"
    write("max_local_prefill_length: 59\n")
    wait_until(lambda: reason() == "long", "the new limit holds")
    write("max_local_prefill_length: -1\n")
    wait_until(lambda: "thresholds are unchanged" in worker.log.read_text(), "the mistake is told")
    assert reason() == "long"
    assert f"max_local_prefill_length: {LIMIT} -> 59" in worker.log.read_text()
    served.wait_until_idle()


def test_the_command_sets_it_on_every_worker(deployment: tuple[Served, Path], oracle: Oracle) -> None:  # noqa: F811
    """Whatever the policy file said before."""
    served, _ = deployment
    flags = ("--max-local-prefill-length", "200")
    ended = command("set", "--run-dir", str(served.deployment.run_dir), *flags)
    assert ended.returncode == 0, ended.stderr
    first = served.first_stage[0]
    assert f"{first.role} {first.instance_id:x}: max_local_prefill_length: 59 -> 200" in ended.stdout
    assert len(ended.stdout.splitlines()) == len(served.workers)
    assert took(served, oracle, ids(200, seed=5), "set")[1] == "short"
    assert took(served, oracle, ids(201, seed=6), "set")[1] == "long"
    assert served.deployment.config.thresholds == {"max_local_prefill_length": 200}


@pytest.fixture
def never_free(tmp_path: Path) -> Iterator[Served]:
    arguments = ("--prefill-decider", "decode_occupancy", "--decode-busy-threshold", "0")
    with served(demo_config("prefill_first", tmp_path / "run", worker_args=arguments)) as deployment:
        yield deployment


def test_requests_are_kept_while_decode_counts_as_full(never_free: Served, oracle: Oracle) -> None:  # noqa: F811
    """At threshold 0 a decode worker is full that uses no block; the first request finds no load told yet."""
    numbers = itertools.count()

    def asked() -> tuple[str, str]:
        number = next(numbers)
        return took(never_free, oracle, ids(60, seed=3000 + number), f"occupancy-{number}")

    assert asked() == ("prefill_first", "load_unknown")
    wait_until(lambda: asked() == ("local", "decode_busy"), "the prefill worker keeps requests")
    run_dir = str(never_free.deployment.run_dir)
    ended = command("set", "--run-dir", run_dir, "--decode-busy-threshold", "1")
    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: asked() == ("prefill_first", "decode_free"), "decode has room again")
    (worker,) = never_free.first_stage
    reasons = worker.labels("trtllm_disagg_requests_total", "reason")
    assert reasons >= {"load_unknown", "decode_busy", "decode_free"}
    never_free.wait_until_idle()


@pytest.fixture
def bypassing(tmp_path: Path) -> Iterator[Served]:
    policy = {"policy": "isl_bounding", "eff_isl_threshold": LIMIT, "eff_isl_ratio_threshold": 0.9}
    arguments = ("--router-conditional-disagg", "--router-conditional-disagg-config", json.dumps(policy))
    with served(demo_config("router", tmp_path / "run", frontend_args=arguments)) as deployment:
        yield deployment


def test_dynamos_frontend_sends_prompts_that_decode_has_cached_past_prefill(
    bypassing: Served,
    oracle: Oracle,  # noqa: F811
) -> None:
    (prefill,) = (worker for worker in bypassing.workers if worker.role == "prefill")

    def prefills_for(prompt: list[int]) -> int:
        before = prefill.num_requests()
        took(bypassing, oracle, prompt, "frontend")
        bypassing.wait_until_idle()
        return int(prefill.num_requests() - before)

    prompt = ids(2 * LIMIT, seed=4000)
    assert prefills_for(prompt) == 1
    wait_until(lambda: prefills_for(prompt) == 0, "the frontend knows what decode has cached")
    assert prefills_for(ids(2 * LIMIT, seed=4001)) == 1


def command(*args: str) -> subprocess.CompletedProcess[str]:
    python = (sys.executable, "-m", "trtllm_disagg")
    return subprocess.run([*python, *args], capture_output=True, text=True, timeout=200, check=False)
