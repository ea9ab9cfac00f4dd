"""The worker that holds a prompt's prefix gets the request, in every strategy;
the frontend never picks a second stage.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployments import MODEL_NAME, Served, Worker, demo_config, served, wait_until

#: Two workers of the stage that the frontend knows, one of the other.
TWO_FIRST: dict[str, str] = {
    "agg": "agg_workers",
    "prefill_first": "prefill_workers",
    "decode_first": "decode_workers",
}
PREFIX, SUFFIX = 320, 80


@pytest.fixture(scope="module", params=list(TWO_FIRST))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    strategy: str = request.param
    config = demo_config(strategy, tmp_path_factory.mktemp(strategy), **{TWO_FIRST[strategy]: 2})
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        if strategy == "agg":
            # The events may be another endpoint's than the one that serves.
            patch.setenv("DYN_KV_STATE_ENDPOINT", f"{config.namespace}/cache/updates")
        deployment = stack.enter_context(served(config))
        # The deployment is ready when the frontend knows one of the two.
        wait_until(
            lambda: all(answered(deployment, [300], pin) for pin in deployment.first_stage), "both known"
        )
        yield deployment


_FIRST = itertools.count(1300)


def fresh(count: int) -> list[int]:
    """Not even its first token is that of an earlier one: the start of a block would be reused."""
    return [next(_FIRST), *random.choices(range(300, 1300), k=count - 1)]


class Routed:
    """An answer, and what the router says about it."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.cached_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.hit_rate: float = answer["nvext"]["timing"]["kv_hit_rate"]
        workers = answer["nvext"]["worker_id"]
        self.worker_ids: set[int] = {workers["prefill_worker_id"], workers["decode_worker_id"]}


def completion(pair: Served, prompt: list[int], pin: Worker | None = None) -> httpx.Response:
    return pair.http.post(
        f"{pair.url}/v1/completions",
        json={
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": 2,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id", "timing"]},
        },
        headers={"x-dynamo-worker-instance-id": str(pin.instance_id)} if pin else {},
    )


def answered(pair: Served, prompt: list[int], pin: Worker) -> bool:
    """The frontend answers 400 for an instance that it does not know yet."""
    return completion(pair, prompt, pin).is_success


def complete(pair: Served, prompt: list[int], pin: Worker | None = None) -> Routed:
    return Routed(completion(pair, prompt, pin).raise_for_status().json())


def is_known(pair: Served, prefix: list[int], holder: Worker) -> bool:
    """Events take their time. What is pinned does not spread meanwhile."""
    return complete(pair, prefix, pin=holder).hit_rate == 1.0


def test_a_repeated_prefix_goes_to_its_holder(pair: Served) -> None:
    for holder in pair.first_stage * 2:
        prefix = fresh(PREFIX)
        complete(pair, prefix, pin=holder)
        wait_until(partial(is_known, pair, prefix, holder), "the router knows")

        for _ in range(4):
            routed = complete(pair, prefix + fresh(SUFFIX))

            assert routed.worker_ids == {holder.instance_id}
            assert routed.hit_rate == PREFIX / (PREFIX + SUFFIX)
            assert routed.cached_tokens == PREFIX


def test_second_stage_gets_requests_from_the_first_stage_only(pair: Served) -> None:
    pair.wait_until_idle()
    before_first, before_second = requests(pair, pair.first_stage), requests(pair, pair.second_stage)

    for _ in range(10):
        routed = complete(pair, fresh(40))
        assert routed.worker_ids <= {worker.instance_id for worker in pair.first_stage}

    pair.wait_until_idle()
    assert requests(pair, pair.first_stage) == before_first + 10
    assert requests(pair, pair.second_stage) == before_second + (10 if pair.second_stage else 0)


def test_the_second_stage_cannot_be_asked_for(pair: Served) -> None:
    for worker in pair.second_stage:
        refusal = pair.http.post(
            f"{pair.url}/v1/completions",
            json={"model": MODEL_NAME, "prompt": fresh(20), "max_tokens": 2},
            headers={"x-dynamo-worker-instance-id": str(worker.instance_id)},
        )

        assert refusal.status_code == 400
    assert [model.id for model in pair.openai.models.list()] == [MODEL_NAME]


def requests(pair: Served, workers: list[Worker]) -> float:
    return sum(worker.num_requests() for worker in workers)


def test_a_worker_that_discovery_has_dropped_is_still_known_by_its_cache(pair: Served) -> None:
    """File discovery drops a process that could not touch its files for 10 s, as on a machine that was asleep."""
    holder = pair.first_stage[0]
    prefix = fresh(PREFIX)
    complete(pair, prefix, pin=holder)
    wait_until(partial(is_known, pair, prefix, holder), "the router knows")
    files = discovery_files(pair, holder)
    assert any("event_sources" in path.parts for path in files)
    for path in files:
        path.unlink()

    wait_until(lambda: len(discovery_files(pair, holder)) == len(files), "the worker is back")
    wait_until(lambda: answered(pair, [300], holder), "the frontend knows it")
    wait_until(partial(is_known, pair, prefix, holder), "the router knows its cache")

    assert complete(pair, prefix + fresh(SUFFIX)).worker_ids == {holder.instance_id}


def discovery_files(pair: Served, worker: Worker) -> list[Path]:
    """What the frontend has of a worker: instance, model card, and the source of its cache events."""
    directory = pair.deployment.config.run_dir / "discovery" / "v1"
    files = [path for path in directory.rglob("*") if path.is_file()]
    sources = [
        found[1]
        for path in files
        if (found := re.search(rf"source%5F(\w+)%2F{worker.instance_id:x}$", path.name))
    ]
    names = (f"{worker.instance_id:x}", *sources)
    return [path for path in files if path.name.endswith(names) and "event_channels" not in path.parts]
