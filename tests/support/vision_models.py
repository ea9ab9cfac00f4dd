"""A tiny random Llava checkpoint, images for it, and transformers' answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.models import EOS, VOCAB, write_tokenizer
from trtllm_disagg.engines.embedded.ipc.messages import ImageTokens

if TYPE_CHECKING:
    from PIL import Image

#: The marker of an image, and the number of tokens that it becomes.
MARKER, NUM_TOKENS = VOCAB - 1, 16
IMAGE_TOKEN = "<image>"
TOKENS = ImageTokens(MARKER, NUM_TOKENS)
_SIDE = 32


def write_vision_checkpoint(directory: Path) -> Path:
    """Large random weights, so that answers vary with the image."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tower = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIDE,
        patch_size=_SIDE // 4,
        initializer_factor=3.0,
    )
    text = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.06,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=tower, text_config=text, image_token_index=MARKER, image_seq_length=NUM_TOKENS
    )
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.model.multi_modal_projector.parameters():
            weight.normal_(0, 0.3)
    model.save_pretrained(directory)
    CLIPImageProcessorPil(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}
    ).save_pretrained(directory)
    write_tokenizer(directory, IMAGE_TOKEN)
    return directory


@functools.cache
def picture(number: int, width: int = 40, height: int = 36) -> Image.Image:
    """Stripes of two colours; another `number`, other ones."""
    from PIL import Image

    image = Image.new("RGB", (width, height), (number * 83 % 256, number * 151 % 256, 90))
    for x in range(0, width, 3 + number % 5):
        image.paste((255 - number * 61 % 256, 20, number * 37 % 256), (x, 0, x + 2, height))
    return image


def reference_answer(
    directory: Path, prompt: list[int], images: Sequence[Image.Image], count: int
) -> list[int]:
    """The greedy answer of transformers to an expanded prompt."""
    import torch
    from transformers import AutoImageProcessor

    tokens = torch.tensor([prompt])
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    pixels: Any = processor(images=list(images), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        output = _reference(directory).generate(
            input_ids=tokens,
            pixel_values=pixels,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


@functools.cache
def _reference(directory: Path) -> Any:
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(directory).eval()
