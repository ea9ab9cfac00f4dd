"""Which instance of the second stage gets a request, seen from outside, in both worker-side orders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.conftest import Checkpoints
from tests.integration.test_faults import config
from tests.support.deployments import RUN_BY_WORKERS, Served, Worker, served
from trtllm_disagg.tools.up.plan import ProcessRole

BLOCK = 16
PREFIX = 4 * BLOCK
FIRST_TOKEN, LAST_TOKEN = 2, 250
FACT = {"prefill_first": "decode_instance", "decode_first": "prefill_instance"}


@pytest.fixture(scope="module", params=RUN_BY_WORKERS)
def pair(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One worker of the first stage, two of the second one."""
    strategy: str = request.param
    twice: dict[str, ProcessRole] = {"decode_first": "prefill", "prefill_first": "decode"}
    run_dir = tmp_path_factory.mktemp(strategy)
    setting = config(strategy, checkpoints("llama"), run_dir, twice.get(strategy))
    with served(replace(setting, next_router="kv")) as deployment:
        yield deployment


def fresh(count: int) -> list[int]:
    return random.choices(range(FIRST_TOKEN, LAST_TOKEN), k=count)


class Answered:
    """An answer, and what its first stage says of its way."""

    def __init__(self, pair: Served, body: dict[str, Any]) -> None:
        told = body["nvext"]["engine_data"]["disagg"]
        self.instance_id = int(told[FACT[pair.strategy]], 16)
        self.fallbacks: list[str] = told.get("fallbacks", [])
        self.cached_tokens: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]


def post(
    pair: Served, prompt: list[int], headers: dict[str, str] | None = None, **nvext: Any
) -> httpx.Response:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "nvext": {"extra_fields": ["engine_data"], **nvext},
    }
    return pair.http.post(f"{pair.url}/v1/completions", json=body, headers=headers)


def ask(pair: Served, prompt: list[int], headers: dict[str, str] | None = None, **nvext: Any) -> Answered:
    return Answered(pair, post(pair, prompt, headers, **nvext).raise_for_status().json())


def pin(*workers: Worker) -> dict[str, Any]:
    return {"annotations": ["disagg:next=" + ",".join(f"{worker.instance_id:x}" for worker in workers)]}


def test_a_repeated_prefix_goes_to_its_holder(pair: Served) -> None:
    """Without knowledge of caches, equals take turns: half of them would."""
    at_home = total = 0
    for holder in pair.second_stage * 4:
        prefix = fresh(PREFIX)
        ask(pair, prefix, **pin(holder))
        for _ in range(8):  # its cache events need a moment
            ask(pair, fresh(BLOCK), **pin(holder))
        for _ in range(4):
            at_home += ask(pair, prefix + fresh(BLOCK)).instance_id == holder.instance_id
            total += 1
    assert at_home >= 0.9 * total, f"{at_home} of {total}"


def test_a_pinned_request_goes_to_the_pinned_instance(pair: Served) -> None:
    for worker in pair.second_stage:
        number = worker.instance_id
        for headers, nvext in [
            ({}, pin(worker)),
            ({}, {"annotations": [f"disagg:next={number}"]}),
            ({}, {"prefill_worker_id": number}),
            ({"x-dynamo-prefill-instance-id": str(number)}, {}),
            (
                {
                    "x-dynamo-prefill-instance-id": str(number),
                    "x-dynamo-worker-instance-id": str(pair.first_stage[0].instance_id),
                },
                {},
            ),
        ]:
            for _ in range(2):  # one could be by turn
                answered = ask(pair, fresh(BLOCK), headers, **nvext)
                assert (answered.instance_id, answered.fallbacks) == (number, [])
    both = {ask(pair, fresh(BLOCK), **pin(*pair.second_stage)).instance_id for _ in range(6)}
    assert both == {worker.instance_id for worker in pair.second_stage}
