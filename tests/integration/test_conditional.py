"""Conditional disaggregation on a running deployment: by length, by what is cached, and by thresholds that change."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.answers import Answer, Question, ask
from tests.parity.cases import ids
from tests.parity.conftest import oracle  # noqa: F401 - a fixture
from tests.parity.oracle import Oracle
from tests.support.deployments import Served, demo_config, served, vision_model, wait_until

LIMIT = 100


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run_dir = tmp_path_factory.mktemp("conditional") / "run"
    arguments = ("--prefill-decider", "length_and_queue", "--max-local-prefill-length", str(LIMIT))
    config = demo_config("decode_first", run_dir, model=str(vision_model()), worker_args=arguments)
    with served(config) as deployment:
        yield deployment


def took(deployment: Served, oracle: Oracle, prompt: list[int], salt: str) -> tuple[str, str]:  # noqa: F811
    """(strategy, reason), of an answer that is the engine's own."""
    question = Question("completions", prompt, {"max_tokens": 6, "ignore_eos": True}, salt=salt)
    answer = ask(deployment.openai, question)
    assert isinstance(answer, Answer), answer
    right = oracle.answer(question)
    assert (answer.token_ids, answer.finish_reason) == (right.token_ids, right.finish_reason)
    return answer.told["strategy"], answer.told["reason"]


def test_cached_tokens_do_not_count_as_prompt_length(deployment: Served, oracle: Oracle) -> None:  # noqa: F811
    prompt = ids(4 * LIMIT, seed=77)
    assert took(deployment, oracle, prompt, "cached") == (deployment.strategy, "long")
    # The engine tells of its blocks a moment later.
    wait_until(
        lambda: took(deployment, oracle, prompt, "cached") == ("local", "short"),
        "the prompt counts as cached",
    )
    assert took(deployment, oracle, prompt, "another-tenant")[1] == "long"


def test_the_command_sets_a_threshold_on_every_worker_without_a_restart(
    deployment: Served,
    oracle: Oracle,  # noqa: F811
) -> None:
    run_dir, flag = str(deployment.deployment.run_dir), "--max-local-prefill-length"
    assert took(deployment, oracle, ids(60, seed=4), "before")[1] == "short"
    refused = command("set", "--run-dir", run_dir, flag, "-1")
    assert (refused.returncode, "-1 is not allowed" in refused.stderr.replace("'", "")) == (2, True)
    first = deployment.first_stage[0]
    for before, limit in ((LIMIT, 59), (59, 200)):
        ended = command("set", "--run-dir", run_dir, flag, str(limit))
        assert ended.returncode == 0, ended.stderr
        told = f"max_local_prefill_length: {before} -> {limit}"
        assert f"{first.role} {first.instance_id:x}: {told}" in ended.stdout
        assert len(ended.stdout.splitlines()) == len(deployment.workers)
        assert took(deployment, oracle, ids(limit, seed=5), f"at {limit}")[1] == "short"
        assert took(deployment, oracle, ids(limit + 1, seed=6), f"above {limit}")[1] == "long"
    assert deployment.deployment.config.thresholds == {"max_local_prefill_length": 200}
    deployment.wait_until_idle()


@pytest.fixture
def never_free(tmp_path: Path) -> Iterator[Served]:
    arguments = ("--prefill-decider", "decode_occupancy", "--decode-busy-threshold", "0")
    config = demo_config("prefill_first", tmp_path / "run", model=str(vision_model()), worker_args=arguments)
    with served(config) as deployment:
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


def command(*args: str) -> subprocess.CompletedProcess[str]:
    python = (sys.executable, "-m", "trtllm_disagg")
    return subprocess.run([*python, *args], capture_output=True, text=True, timeout=200, check=False)
