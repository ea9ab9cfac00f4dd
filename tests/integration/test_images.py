"""Images as users send them, through the real frontend, to every strategy; and what cannot be served."""

from __future__ import annotations

import base64
import random
import time
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from tests.parity.answers import Answer, Question, Refusal, ask
from tests.parity.cases import WHAT
from tests.support.deployments import FIXED, Served
from trtllm_disagg.engines.demo_model.drawings import data_url, draw

every_strategy = pytest.mark.parametrize("strategy", FIXED)
RED = data_url(draw("red", "circle", random.Random(4)))


def about(*urls: str, part: str = "image_url", **more: str) -> Question:
    parts: list[Any] = [{"type": part, part: {"url": url}, **more} for url in urls]
    content = [{"type": "text", "text": WHAT}, *parts]
    return Question("chat", [{"role": "user", "content": content}], {"max_tokens": 12, "temperature": 0})


def answer_of(served: Served, url: str) -> str:
    answer = ask(served.openai, about(url))
    assert isinstance(answer, Answer), answer
    return answer.text


@every_strategy
def test_an_image_is_named_whatever_its_format_and_after_5_mb(strategy: str, deployed: Served) -> None:
    noise = data_url(Image.frombytes("RGB", (1120, 1120), random.Random(1).randbytes(3 * 1120 * 1120)))
    assert 4.5e6 < len(noise) < 6e6
    answer_of(deployed, noise)
    for colour, shape, file_type in (
        ("red", "circle", "PNG"),
        ("blue", "square", "JPEG"),
        ("green", "cross", "WEBP"),
    ):
        draw(colour, shape, random.Random(4)).save(saved := BytesIO(), file_type)
        url = f"data:image/{file_type.lower()};base64,{base64.b64encode(saved.getvalue()).decode()}"
        assert f"{colour} {shape}" in answer_of(deployed, url)


#: What is asked, and a part of the refusal.
REFUSED = {
    "cut off": (about(RED[:90]), ""),
    "empty": (about("data:image/png;base64,"), ""),
    "a GIF": (about("data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"), ""),
    "a text": (about("data:text/plain;base64,aGVsbG8="), ""),
    "a file": (about("file:///etc/passwd"), ""),
    "the host's own network": (about("https://169.254.169.254/latest/meta-data"), ""),
    "no host": (about("https://no-such-host.invalid/a.png"), ""),
    "http": (about("http://no-such-host.invalid/a.png"), ""),
    "a video": (about("https://example.com/a.mp4", part="video_url"), "video_url"),
    "an id of the client": (about(RED, uuid="mine"), "uuid"),
    "too many": (about(*[RED] * 130), "the prompt has 2"),
}


@every_strategy
def test_what_cannot_be_served_is_a_400_in_one_sentence_before_anything_is_computed(
    strategy: str, deployed: Served
) -> None:
    deployed.wait_until_idle()
    before = [worker.num_requests() for worker in deployed.workers]
    for name, (question, reason) in REFUSED.items():
        began = time.monotonic()
        refused = ask(deployed.openai, question)
        assert isinstance(refused, Refusal), name
        assert (refused.status, reason in refused.message) == (400, True), name
        assert len(refused.message) < 400, name
        assert time.monotonic() - began < 20, name
    deployed.wait_until_idle()
    assert [worker.num_requests() for worker in deployed.workers] == before
    assert "red circle" in answer_of(deployed, RED)
