"""Images as users send them, through the real frontend, to every strategy; and what cannot be served."""

from __future__ import annotations

import base64
import random
import time
from io import BytesIO
from typing import Any

import pytest
from openai import APIStatusError
from PIL import Image

from tests.support.deployments import FIXED, MODEL_NAME, Served
from trtllm_disagg.engines.demo_model.drawings import data_url, draw

every_strategy = pytest.mark.parametrize("strategy", FIXED)

TEXT = {"type": "text", "text": "What is in the image?"}


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(served: Served, *parts: dict[str, Any], **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": [TEXT, *parts]}]
    options = {"max_tokens": 12, "temperature": 0} | options
    return served.openai.chat.completions.create(model=MODEL_NAME, messages=messages, **options)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def drawing(name: str, size: int = 64) -> Image.Image:
    colour, shape = name.split()
    return draw(colour, shape, random.Random(4), size)


def large_png() -> str:
    """A data URL of some 5 MB, as a photograph has."""
    noise = Image.frombytes("RGB", (1120, 1120), random.Random(1).randbytes(3 * 1120 * 1120))
    url = data_url(noise)
    assert 4.5e6 < len(url) < 6e6
    return url


@every_strategy
def test_an_image_is_named_by_colour_and_shape_whatever_its_format(strategy: str, deployed: Served) -> None:
    for name, file_type in (("red circle", "PNG"), ("blue square", "JPEG"), ("green cross", "WEBP")):
        saved = BytesIO()
        drawing(name).save(saved, file_type)
        url = f"data:image/{file_type.lower()};base64,{base64.b64encode(saved.getvalue()).decode()}"
        assert name in text_of(ask(deployed, part(url)))


@every_strategy
def test_a_photograph_of_5_mb_is_answered(strategy: str, deployed: Served) -> None:
    assert ask(deployed, part(large_png())).usage.completion_tokens
    assert sees(deployed)


def sees(served: Served) -> bool:
    names = ("red circle", "blue square")
    return all(name in text_of(ask(served, part(data_url(drawing(name))))) for name in names)


BROKEN = {
    "cut off": data_url(drawing("red circle"))[:90],
    "empty": "data:image/png;base64,",
    "a GIF": "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7",
    "a text": "data:text/plain;base64,aGVsbG8=",
    "a file": "file:///etc/passwd",
    "the host's own network": "https://169.254.169.254/latest/meta-data",
    "no host": "https://no-such-host.invalid/a.png",
    "http": "http://no-such-host.invalid/a.png",
}


@every_strategy
def test_what_cannot_be_served_is_a_400_in_one_sentence_and_the_workers_go_on(
    strategy: str, deployed: Served
) -> None:
    for name, url in BROKEN.items():
        began = time.monotonic()
        with pytest.raises(APIStatusError) as refused:
            ask(deployed, part(url))
        assert refused.value.status_code == 400, name
        assert len(refused.value.response.json()["message"]) < 400, name
        assert time.monotonic() - began < 20, name
    with pytest.raises(APIStatusError, match="video_url"):
        ask(deployed, {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}})
    with pytest.raises(APIStatusError, match="uuid"):
        ask(deployed, {**part(data_url(drawing("red circle"))), "uuid": "mine"})
    assert sees(deployed)
    deployed.wait_until_idle()


@every_strategy
def test_an_images_tokens_count_as_the_prompts(strategy: str, deployed: Served) -> None:
    url = part(data_url(drawing("red circle")))
    one, two = (ask(deployed, *[url] * count).usage.prompt_tokens for count in (1, 2))
    assert two - one == 17  # the template numbers images
    streamed = ask(deployed, url, stream=True, stream_options={"include_usage": True})
    [usage] = [chunk.usage for chunk in streamed if chunk.usage is not None]
    assert usage.prompt_tokens == one


@every_strategy
def test_images_beyond_max_seq_len_are_refused_by_their_number_of_tokens(
    strategy: str, deployed: Served
) -> None:
    with pytest.raises(APIStatusError, match=r"the prompt has 2\d\d\d tokens") as refused:
        ask(deployed, *[part(data_url(drawing("red circle")))] * 130)
    assert refused.value.status_code == 400
