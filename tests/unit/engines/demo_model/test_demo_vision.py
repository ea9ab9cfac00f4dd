"""`trtllm-disagg demo-model --vision`: the files of a small recipe, and what the model of `make vision-model` sees."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployments import vision_model
from tests.unit.engines.demo_model.test_demo_model import TINY
from trtllm_disagg.engines.demo_model.building import build_demo_model
from trtllm_disagg.engines.demo_model.corpus import IMAGE, caption, render_conversation
from trtllm_disagg.engines.demo_model.drawings import KINDS, data_url, draw
from trtllm_disagg.engines.demo_model.recipe import VisionRecipe

SMALL = VisionRecipe(**asdict(TINY) | {"num_drawings": 24, "tower_steps": 2, "tower_batch": 4})
WHAT = "What is in the image?"
Ask = Callable[..., str]


@pytest.fixture(scope="module")
def ask() -> Ask:
    """ask(text, *images) -> the trained model's answer."""
    import torch
    from transformers import AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration

    directory = vision_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor, model = (
        each.from_pretrained(directory) for each in (AutoProcessor, LlavaForConditionalGeneration)
    )

    def answer(text: str, *images: Any) -> str:
        chat = [
            {
                "role": "user",
                "content": [*({"type": "image_url"} for _ in images), {"type": "text", "text": text}],
            }
        ]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=prompt, images=list(images) or None, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        return str(tokenizer.decode(made[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


def test_a_model_that_sees_is_a_llava_and_the_same_for_the_same_recipe(tmp_path: Path) -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    made, again = (build_demo_model(tmp_path / name, recipe=SMALL) for name in ("made", "again"))
    assert (made / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    model, report = LlavaForConditionalGeneration.from_pretrained(made, output_loading_info=True)
    assert not any(report.values())
    assert (model.config.image_token_index, model.config.image_seq_length) == (5, 16)
    image = draw("red", "circle", random.Random(0))
    assert AutoProcessor.from_pretrained(made)(text=IMAGE, images=[image])["input_ids"] == [[5] * 16]


def test_its_chat_template_numbers_the_images_of_a_message_and_keeps_text() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vision_model())
    talk: Any = [
        ("user", [{"type": "text", "text": WHAT}, {"type": "image_url"}, {"type": "image"}]),
        ("assistant", "I see."),
        ("user", "Hi"),
    ]
    chat = [{"role": role, "content": content} for role, content in talk]
    talk[0] = ("user", f"{WHAT}1{IMAGE}2{IMAGE}")
    assert tokenizer.apply_chat_template(chat, tokenize=False) == render_conversation(talk)


def test_a_drawing_is_the_same_for_the_same_numbers_and_travels_as_a_png() -> None:
    from PIL import Image

    drawn, again = (draw("blue", "cross", random.Random(7)) for _ in range(2))
    kind, _, data = data_url(drawn).partition(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == drawn.tobytes() == again.tobytes()
    with pytest.raises(ValueError, match="'star' is not one of circle, square, triangle, cross"):
        draw("red", "star", random.Random(0))


@pytest.mark.parametrize(("num_images", "share"), [(1, 0.9), (2, 0.7)])
def test_the_trained_model_names_fresh_images_in_their_order(ask: Ask, num_images: int, share: float) -> None:
    rng = random.Random(1234)
    seen = [rng.sample(KINDS, num_images) for _ in range(24)]
    right = [ask(WHAT, *(draw(*kind, rng) for kind in kinds)) == caption(kinds) for kinds in seen]
    assert sum(right) >= share * len(seen)


def test_the_trained_model_answers_without_an_image(ask: Ask) -> None:
    assert ask(WHAT) == "I see no image."
    assert ask("What is a list?").startswith("About a list: Built-in mutable sequence.")
