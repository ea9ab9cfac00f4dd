"""Deployments with workers that compute on the GPU, behind the real frontend: each order answers as one engine does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.parity.answers import Answer, Question, ask
from tests.support.deployments import DEMO_CONFIGS, FIXED, Served, demo_config, served, wait_until
from trtllm_disagg.tools.up.up_command import engine_configs_in

NEW_TOKENS = 40
#: Of several blocks each; the last two have a long beginning in common.
TOPICS = ["a list", "a tuple", "a generator", "an exception", *(f"{'a module ' * 60}{i}" for i in (1, 2))]


@pytest.fixture(scope="module")
def configs_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's files of engine arguments, with `device: cuda`."""
    directory = tmp_path_factory.mktemp("engine-configs")
    for file in DEMO_CONFIGS.glob("*.yaml"):
        text, count = re.subn(r"device: cpu", "device: cuda", file.read_text())
        assert count == 1
        (directory / file.name).write_text(text)
    return directory


@pytest.fixture(scope="module")
def deployments(
    configs_on_gpu: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Served]]:
    """All at once: to start is mostly to wait."""
    with ExitStack() as stack, ThreadPoolExecutor(len(FIXED)) as pool:

        def start(strategy: str) -> Served:
            configs: Any = engine_configs_in(configs_on_gpu, strategy)
            config = demo_config(strategy, tmp_path_factory.mktemp(strategy), engine_configs=configs)
            return stack.enter_context(served(config))

        yield dict(zip(FIXED, pool.map(start, FIXED), strict=True))


def questions(salt: str) -> list[Question]:
    options = {"max_tokens": NEW_TOKENS, "temperature": 0.0}
    return [
        Question("chat", [{"role": "user", "content": f"What is {topic}?"}], options, stream, salt)
        for topic in TOPICS
        for stream in (False, True)
    ]


def tokens_of(answers: list[Any]) -> list[tuple[int, ...]]:
    assert all(isinstance(answer, Answer) for answer in answers), answers
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("strategy", FIXED)
def test_every_strategy_has_the_tokens_of_agg_on_a_gpu(strategy: str, deployments: dict[str, Served]) -> None:
    """Alone, with a warm cache, and all at once. What is held comes back each time."""
    right = tokens_of([ask(deployments["agg"].openai, question) for question in questions("right")])
    assert min(len(tokens) for tokens in right) > 1

    deployed = deployments[strategy]
    for salt in ("alone", "alone"):
        assert tokens_of([ask(deployed.openai, question) for question in questions(salt)]) == right
        deployed.wait_until_idle()
    with ThreadPoolExecutor(len(right)) as pool:
        at_once = list(pool.map(lambda question: ask(deployed.openai, question), questions("at once")))
    assert tokens_of(at_once) == right
    deployed.wait_until_idle()


@pytest.mark.parametrize("strategy", [name for name in FIXED if name != "agg"])
def test_kv_moved_between_processes_on_the_gpu(strategy: str, deployments: dict[str, Served]) -> None:
    """The decode worker says how many bytes it read of the prefill worker's pool."""
    deployed = deployments[strategy]
    before = deployed.total("trtllm_disagg_kv_transfer_bytes_sum")
    tokens_of([ask(deployed.openai, question) for question in questions("moved")])
    assert deployed.total("trtllm_disagg_kv_transfer_bytes_sum") > before


def test_generation_first_has_the_tokens_of_agg_on_a_gpu(
    deployments: dict[str, Served], configs_on_gpu: Path, tmp_path: Path
) -> None:
    """Prefill writes KV while it computes the next chunk of the prompt."""
    configs: Any = engine_configs_in(configs_on_gpu, "decode_first")
    chunks = ("--schedule-style", "generation_first", "--max-num-tokens", "32")
    config = demo_config("decode_first", tmp_path / "run", engine_configs=configs, worker_args=chunks)
    right = tokens_of([ask(deployments["agg"].openai, question) for question in questions("right")])
    with served(config) as deployed:
        assert tokens_of([ask(deployed.openai, question) for question in questions("alone")]) == right
        with ThreadPoolExecutor(len(right)) as pool:
            at_once = list(pool.map(lambda question: ask(deployed.openai, question), questions("at once")))
        assert tokens_of(at_once) == right
        deployed.wait_until_idle()


def test_killed_prefill_workers_cost_no_answer_on_a_gpu(configs_on_gpu: Path, tmp_path: Path) -> None:
    """The decode worker has their memory mapped. One of two is killed, then the other one too."""
    configs: Any = engine_configs_in(configs_on_gpu, "decode_first")
    config = demo_config("decode_first", tmp_path / "run", engine_configs=configs, prefill_workers=2)
    with served(config) as deployed:
        right = tokens_of([ask(deployed.openai, question) for question in questions("undisturbed")])
        for victim in deployed.deployment.of_role("prefill"):
            with ThreadPoolExecutor(len(right)) as pool:
                asked = [pool.submit(ask, deployed.openai, q) for q in questions(f"without {victim.name}")]
                next(as_completed(asked))
                psutil.Process(victim.pid).kill()
                assert tokens_of([answer.result() for answer in asked]) == right
        assert tokens_of([ask(deployed.openai, question) for question in questions("alone")]) == right
        [decode] = deployed.of_role("decode")
        wait_until(lambda: not decode.held_and_counted()[0], "the decode worker holds nothing")
