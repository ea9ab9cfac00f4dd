"""Workers side by side in discovery: a second model behind one name is refused; a first stage waits, or is alone."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import Checkpoints
from tests.support.dynamo_deployment import COMPLETIONS, START_TIMEOUT, DynamoDeployment
from trtllm_disagg.common.model_directory import fingerprint

#: No model is loaded: what is refused is refused before that.
WORKER = ["trtllm_disagg", "worker", "--engine", "recording"]
SECOND_STAGE = ["--disaggregation-mode", "decode", "--disaggregation-strategy", "prefill_first"]


def worker(model: Path, *more: str, name: str = "tiny") -> list[str]:
    return [*WORKER, "--model", str(model), "--served-model-name", name, *more]


def serves(place: DynamoDeployment, name: str) -> None:
    place.wait_until(lambda: "worker ready" in place.log(name), f"{name} is ready")


def refusal(place: DynamoDeployment, name: str) -> str:
    """Its last words."""
    place.wait_until(lambda: place.exit_code(name) is not None, f"{name} ends")
    assert place.exit_code(name) == 2, place.log(name)
    assert "loading" not in place.log(name), "it was known before the engine was built"
    return place.log(name)


def test_the_second_of_two_models_behind_one_name_is_refused(
    place: DynamoDeployment, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model, other = checkpoints("llama"), checkpoints("llama", 1)
    copied = tmp_path / "copy"
    shutil.copytree(model, copied)
    # No first stage is there that could tell the two second ones apart.
    apart = ["--namespace", "apart", *SECOND_STAGE]
    place.start_workers({"agg": worker(model), "decode": worker(model, *apart)})
    serves(place, "agg")
    serves(place, "decode")

    place.start_workers(
        {
            "wrong_agg": worker(other),
            "wrong_decode": worker(other, *apart),
            "copy": worker(copied),
            "other_place": worker(other, "--namespace", "another", name="another"),
            "wrong_name": worker(model, name="another"),
        }
    )
    serves(place, "copy")
    serves(place, "other_place")
    said = refusal(place, "wrong_name")
    assert "--served-model-name: 'another' is not allowed; expected 'tiny', which agg" in said
    for name, role in (("wrong_agg", "agg"), ("wrong_decode", "decode")):
        said = refusal(place, name)
        assert re.search(
            f"--model: '{other}' \\(hash {fingerprint(other)}\\) is not allowed; expected the model that {role} "
            f".* serves as 'tiny': '({model}|{copied})' \\(hash {fingerprint(model)}\\); give ",
            said,
        ), said
        assert "--served-model-name and --namespace" in said
        assert "Traceback" not in said


# -- a first stage without a second one


#: By the model's name, which is its namespace too: the roles of first and second stage.
ORDERS = {"prefill_first": ("prefill", "decode"), "decode_first": ("decode", "prefill")}
WAITING = "waiting"


def stage_worker(model: Path, name: str, order: str, role: str, *more: str) -> list[str]:
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
        {f"{order}-1": stage_worker(model, order, order, first) for order, (first, _) in ORDERS.items()}
        | {WAITING: stage_worker(model, WAITING, "decode_first", "decode", "--on-missing-stage", "fail")}
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
        {f"{order}-2": stage_worker(model, order, order, second) for order, (_, second) in ORDERS.items()}
    )
    for order in ORDERS:
        place.wait_until(partial(is_split, place, order), f"{order} is back", START_TIMEOUT)
        assert "fallbacks" not in told(place, order)
    assert "worker ready" not in place.log(WAITING)
