"""The checks of images: each passes where all is right, and fails of a fault that is planted."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from scripts.gpu_day import FAIL, PASS, Day, tried
from scripts.gpu_images import CHECKS, parsed
from scripts.gpu_site import TENSORRT_LLM, RefusedError, Site

ORDER = "decode_first"
RIGHT = {"strategy": ORDER}


def colour_of(url: str) -> str:
    try:
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    except OSError as error:
        raise RefusedError(400, str(error)) from error
    red, _, blue = image.getpixel((image.width // 2, image.height // 2))  # type: ignore[misc]
    return "red" if red > blue else "blue"


@dataclass
class Faulty(Site):
    """Looks at the image itself; `fault` may change what it answers."""

    url: str = ""
    model: str = ""
    order: str = ORDER
    fault: Callable[[str], str] = colour_of
    served: Any = None

    def post(self, path: str, **body: Any) -> Any:
        url = body["messages"][0]["content"][1]["image_url"]["url"]
        message = {"content": f"It is {self.fault(url)}."}
        return {"choices": [{"message": message}], "nvext": {"engine_data": {"disagg": self.served or RIGHT}}}


def verdicts(**fault: Any) -> dict[str, str]:
    site, order = Faulty(**fault), f"{ORDER}: "
    return {
        check.name.removeprefix(order): tried(check, site, Day(TENSORRT_LLM, 1.0)).verdict
        for check in CHECKS
        if check.name.startswith(order) and check.run.__name__ != "check"
    }


IN_TURN, AT_ONCE, BROKEN = "red and blue in turn", "red and blue at once", "a broken image"


def test_right_answers_pass_every_check() -> None:
    assert verdicts() == {IN_TURN: PASS, AT_ONCE: PASS, BROKEN: PASS}


def unread(url: str) -> str:
    with suppress(RefusedError):
        return colour_of(url)
    return "red"


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        ({"fault": lambda _: "red"}, {IN_TURN, AT_ONCE, BROKEN}),  # KV of the first image of this size
        ({"fault": lambda url: f"{colour_of(url)}, not red or blue"}, {IN_TURN, AT_ONCE, BROKEN}),
        ({"served": {"strategy": "local"}}, {IN_TURN, AT_ONCE, BROKEN}),
        ({"fault": unread}, {BROKEN}),
    ],
    ids=["the first image's KV", "both colours", "on one worker", "a broken image is answered"],
)
def test_planted_fault_fails_its_checks(fault: dict[str, Any], failed: set[str]) -> None:
    assert {name for name, verdict in verdicts(**fault).items() if verdict == FAIL} == failed


def test_two_workers_on_one_gpu_get_engine_files_and_the_flag() -> None:
    options = parsed(["--model", "m", "--gpus", "0"])
    assert options.worker_args.startswith("--enable-multimodal --trtllm.kv_cache_config.free_gpu")
    assert options.engine_configs.name == "qwen2.5-vl"
    assert parsed(["--model", "m", "--engine", "embedded"]).worker_args == "--enable-multimodal"
