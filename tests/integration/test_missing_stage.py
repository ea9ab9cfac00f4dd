"""A first stage without a second one serves alone, and calls the second one when it comes; or it waits, if told so."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.dynamo_deployment import COMPLETIONS, START_TIMEOUT, DynamoDeployment

#: By the model's name, which is its namespace too: the roles of first and second stage.
ORDERS = {"prefill_first": ("prefill", "decode"), "decode_first": ("decode", "prefill")}
WAITING = "waiting"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DynamoDeployment]:
    place = DynamoDeployment(tmp_path)
    yield place
    place.stop()


def worker(model: Path, name: str, order: str, role: str, *more: str) -> list[str]:
    return [
        *("trtllm_disagg", "worker", "--engine", "recording", "--model", str(model)),
        *("--served-model-name", name, "--namespace", name),
        *("--disaggregation-strategy", order, "--disaggregation-mode", role),
        *more,
    ]


def body(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": "which worker answers this one?",
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0,
        "nvext": {"extra_fields": ["engine_data"]},
    }


def told(place: DynamoDeployment, model: str) -> dict[str, Any]:
    """What the worker says of an answer. That its tokens are the same either way: `test_faults.py`."""
    said: dict[str, Any] = place.post_ok(COMPLETIONS, body(model))["nvext"]["engine_data"]["disagg"]
    return said


def is_split(place: DynamoDeployment, order: str) -> bool:
    return bool(told(place, order)["strategy"] == order)


def test_a_first_stage_serves_alone_until_the_second_one_comes(
    place: DynamoDeployment, checkpoints: Checkpoints
) -> None:
    model = checkpoints("llama")
    place.start_frontend()
    place.start_workers(
        {f"{order}-1": worker(model, order, order, first) for order, (first, _) in ORDERS.items()}
        | {WAITING: worker(model, WAITING, "decode_first", "decode", "--on-missing-stage", "fail")}
    )
    for order in ORDERS:
        place.wait_ready(body(order))
        alone = told(place, order)
        assert alone["strategy"] == "local"
        assert alone["fallbacks"][-1].startswith("local:")
        assert "answers alone until one comes" in place.log(f"{order}-1")
    place.wait_until(lambda: "waiting for the second stage" in place.log(WAITING), "the other one waits")
    assert place.post(COMPLETIONS, body(WAITING))[0] == 404

    place.start_workers(
        {f"{order}-2": worker(model, order, order, second) for order, (_, second) in ORDERS.items()}
    )
    for order in ORDERS:
        place.wait_until(partial(is_split, place, order), f"{order} is back", START_TIMEOUT)
        assert "fallbacks" not in told(place, order)
    assert "worker ready" not in place.log(WAITING)
