"""Images beside upstream's own worker: served by it alone, by a pair of it, and by one of its workers with one of ours.

All have to give the tokens of transformers, whatever was asked before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_upstream_worker import DISAGG_YAML, worker_command
from tests.support.dynamo_deployment import COMPLETIONS, START_TIMEOUT, DynamoDeployment
from tests.support.vision_models import MARKER, NUM_TOKENS, picture, reference_answer
from trtllm_disagg.engines.demo_model.drawings import data_url

AGG, PAIR = "agg", "pair"
ROLES = ("prefill", "decode")
#: Numbers of images. All have the same size, so their prompts have the same tokens, and full blocks end in images.
Images = tuple[int, ...]
ASKED: list[Images] = [(1,), (1, 2), (2, 1), (2, 2), (1, 2)]
NUM_ANSWER = 12


#: In place of upstream's module; the flags are the same.
OURS = ["trtllm_disagg", "worker", "--engine", "embedded", "--disaggregation-strategy", "router"]


@pytest.fixture(scope="module")
def deployment(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoDeployment]:
    """Upstream's agg worker, and behind one name two workers of each role: upstream's and ours."""
    deployment = DynamoDeployment(tmp_path_factory.mktemp("images"))
    (deployment.directory / "engine.yaml").write_text(DISAGG_YAML)

    def upstream(role: str, name: str) -> list[str]:
        named = ["--namespace", name, "--served-model-name", name]
        return [*worker_command(role, llava, deployment.directory), "--enable-multimodal", *named]

    try:
        deployment.start_frontend()
        pair = {role: upstream(role, PAIR) for role in ROLES}
        upstreams = {f"upstream {role}": command for role, command in pair.items()}
        deployment.start_workers({AGG: upstream("agg", AGG), **upstreams})
        deployment.wait_ready({"model": AGG, "prompt": [5], "max_tokens": 1})
        deployment.start_workers({f"our {role}": [*OURS, *command[3:]] for role, command in pair.items()})
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture(scope="module")
def instances(deployment: DynamoDeployment) -> dict[str, int]:
    """Of the pairs' workers, by name, once the frontend calls all of them."""
    seen: dict[str, set[int]] = {role: set() for role in ROLES}

    def all_are_called() -> bool:
        text = {"model": PAIR, "prompt": [5], "max_tokens": 1, "nvext": {"extra_fields": ["worker_id"]}}
        status, content = deployment.post(COMPLETIONS, text)
        if status == 200:
            called = json.loads(content)["nvext"]["worker_id"]
            for role in ROLES:
                seen[role].add(called[f"{role}_worker_id"])
        return all(len(each) == 2 for each in seen.values())

    deployment.wait_until(all_are_called, "all workers are called", START_TIMEOUT)
    ours = {role: int(deployment.asks(f"our {role}", {})["instance"], 16) for role in ROLES}
    upstreams = {f"upstream {role}": (seen[role] - {ours[role]}).pop() for role in ROLES}
    return {f"our {role}": number for role, number in ours.items()} | upstreams


@pytest.fixture(scope="module")
def expected(llava: Path) -> dict[Images, list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llava)
    answers = {}
    for numbers in ASKED:
        chat = messages(numbers)
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        runs = ([token] * (NUM_TOKENS if token == MARKER else 1) for token in prompt)
        images = [picture(number) for number in numbers]
        answers[numbers] = reference_answer(llava, [*chain.from_iterable(runs)], images, NUM_ANSWER)
    assert len(set(map(tuple, answers.values()))) == len(set(ASKED)), "each image matters"
    return answers


def messages(numbers: Images) -> list[dict[str, Any]]:
    urls = [{"url": data_url(picture(number))} for number in numbers]
    images = [{"type": "image_url", "image_url": url} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": "Which one is it, and why?"}]}]


def ask(deployment: DynamoDeployment, model: str, numbers: Images, **pins: int) -> dict[str, Any]:
    extra = {"extra_fields": ["completion_token_ids", "worker_id"], **pins}
    options = {"max_tokens": NUM_ANSWER, "temperature": 0.0, "ignore_eos": True}
    body = {"model": model, "messages": messages(numbers), "nvext": extra, **options}
    said: dict[str, Any] = deployment.post_ok("/v1/chat/completions", body)["nvext"]
    return said


def test_upstreams_agg_worker_answers_about_images(
    deployment: DynamoDeployment, expected: dict[Images, list[int]]
) -> None:
    for numbers in ASKED:
        assert ask(deployment, AGG, numbers)["completion_token_ids"] == expected[numbers]


@pytest.mark.parametrize(
    "pair", [("upstream", "upstream"), ("our", "upstream"), ("upstream", "our")], ids=" prefill, ".join
)
def test_a_pair_with_upstreams_worker_answers_about_images(
    deployment: DynamoDeployment,
    instances: dict[str, int],
    expected: dict[Images, list[int]],
    pair: tuple[str, str],
) -> None:
    """The engine refuses a decode with another expanded prompt than the prefill's."""
    pins = {f"{role}_worker_id": instances[f"{side} {role}"] for side, role in zip(pair, ROLES, strict=True)}
    for numbers in ASKED:
        said = ask(deployment, PAIR, numbers, **pins)
        assert said["completion_token_ids"] == expected[numbers]
        assert pins.items() <= said["worker_id"].items()
