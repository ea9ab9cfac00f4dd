"""Trains a demo model that sees: first a tower for colours and shapes, then text and answers about images.

In training, each token of a drawing has an id of its own, above the vocabulary: its row in the features of all
drawings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

from trtllm_disagg.engines.demo_model import training
from trtllm_disagg.engines.demo_model.corpus import IMAGE, Article, image_conversation, render_conversation
from trtllm_disagg.engines.demo_model.drawings import COLOURS, KINDS, SHAPES, draw
from trtllm_disagg.engines.demo_model.recipe import VisionRecipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIXELS, PATCH, FEATURES = 32, 8, 64
TOKENS_PER_IMAGE = (PIXELS // PATCH) ** 2


def train(recipe: VisionRecipe, source: list[Article], tokenizer: Tokenizer, report: training.Report) -> Any:
    """A trained float32 Llava. One recipe on one machine always gives the same weights."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    order = random.Random(recipe.seed)
    drawn = order.choices(KINDS, k=recipe.num_drawings)
    images = [draw(colour, shape, order) for colour, shape in drawn]
    pixels = image_processor()(images, return_tensors="pt")["pixel_values"]
    llava = new_model(recipe, tokenizer)
    train_tower(recipe, llava.model.vision_tower, drawn, pixels, report)
    with torch.no_grad():
        reader = Reader(llava, features(llava.model.vision_tower, pixels))
    lessons = training.batches(recipe, mixed_documents(recipe, source, tokenizer, drawn), tokenizer)
    losses = (training.next_token_loss(reader, batch) for batch in lessons)
    training.descend(recipe, reader, losses, report)
    return llava.eval()


def image_processor() -> Any:
    size = {"height": PIXELS, "width": PIXELS}
    return CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)


def save_processor(directory: Path) -> None:
    """Writes what `AutoProcessor` needs beside the tokenizer."""
    image_processor().save_pretrained(directory)
    counts = {
        "patch_size": PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    names = {"processor_class": "LlavaProcessor", "image_token": IMAGE}
    (directory / "processor_config.json").write_text(json.dumps(names | counts, indent=2))


def new_model(recipe: VisionRecipe, tokenizer: Tokenizer) -> Any:
    sizes = {"hidden_size": FEATURES, "intermediate_size": 4 * FEATURES, "projection_dim": FEATURES}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            **sizes, num_hidden_layers=2, num_attention_heads=4, image_size=PIXELS, patch_size=PATCH
        ),
        text_config=training.text_config(recipe, tokenizer),
        image_token_index=training.id_of(IMAGE, tokenizer),
        image_seq_length=TOKENS_PER_IMAGE,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    training.start_without_effect(model.model.language_model.layers)
    # As large as the patches' embeddings: with small ones, shapes are learned late.
    nn.init.normal_(model.model.vision_tower.embeddings.position_embedding.weight, std=0.3)
    return model


def train_tower(
    recipe: VisionRecipe, tower: Any, drawn: list[tuple[str, str]], pixels: Tensor, report: training.Report
) -> None:
    """Train with linear heads for colour and shape, then freeze.

    Two heads read each feature's largest value in the image, which is learned soon. Two read every token, so that the
    language model finds the answer in each of them.
    """
    names: list[list[str]] = [[*COLOURS], [*SHAPES]]
    labels = torch.tensor([[of.index(name) for of, name in zip(names, each, strict=True)] for each in drawn])
    heads = nn.ModuleList(nn.Linear(FEATURES, len(of)) for of in names * 2)

    def losses() -> Iterator[Tensor]:
        for _ in range(recipe.tower_steps):
            some = torch.randint(len(labels), (recipe.tower_batch,))
            tokens = features(tower, pixels[some])
            views = [tokens.amax(1)] * 2 + [tokens.flatten(0, 1)] * 2
            right = [*labels[some].T, *labels[some].repeat_interleave(TOKENS_PER_IMAGE, 0).T]
            said = [head(view) for head, view in zip(heads, views, strict=True)]
            yield torch.stack([*map(cross_entropy, said, right)]).sum()

    paced = replace(
        recipe,
        steps=recipe.tower_steps,
        matrix_learning_rate=recipe.tower_matrix_learning_rate,
        learning_rate=recipe.tower_learning_rate,
    )
    training.descend(paced, nn.ModuleList([tower, heads]), losses(), report)
    tower.requires_grad_(False)


def features(tower: Any, pixels: Tensor) -> Any:
    """(images, tokens, FEATURES), without the class token."""
    return tower(pixels).last_hidden_state[:, 1:]


class Reader(nn.Module):
    """Reads training text for `next_token_loss`. `features`: (images, tokens, FEATURES) of all drawings."""

    def __init__(self, llava: Any, features: Tensor) -> None:
        super().__init__()
        self.llava, self.lm_head, self._features = llava, llava.lm_head, features.flatten(0, 1)

    def model(self, tokens: Tensor) -> Any:
        text = self.llava.model.language_model
        is_image = tokens >= text.config.vocab_size
        embedded = text.embed_tokens(tokens.where(~is_image, 0))
        seen = self._features[tokens[is_image] - text.config.vocab_size]
        embedded[is_image] = self.llava.model.multi_modal_projector(seen).to(embedded.dtype)
        return text(inputs_embeds=embedded)


def mixed_documents(
    recipe: VisionRecipe, source: list[Article], tokenizer: Tokenizer, drawn: list[tuple[str, str]]
) -> Iterator[list[int]]:
    """Ids of endless documents of text, with documents about one to three images in between."""
    order = random.Random(recipe.seed)
    marker, first = training.id_of(IMAGE, tokenizer), tokenizer.get_vocab_size()
    texts = training.endless_documents(recipe, source, tokenizer)
    while True:
        yield from islice(texts, recipe.texts_between_images)
        chosen = order.sample(range(len(drawn)), order.choice((1, 1, 2, 2, 3)))
        talk = image_conversation([drawn[each] for each in chosen], order)
        starts = (first + TOKENS_PER_IMAGE * each for each in chosen)
        document: list[int] = []
        for token in tokenizer.encode(render_conversation(talk)).ids:
            start, count = (next(starts), TOKENS_PER_IMAGE) if token == marker else (token, 1)
            document += range(start, start + count)
        yield document
