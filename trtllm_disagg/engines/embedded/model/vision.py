"""Turns an image into the vectors that a language model reads in its place: transformers' processor, tower, projector.

One image at a time, so that an image's vectors have the same bits in every request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from trtllm_disagg.engines.embedded.ipc.messages import Pixels
from trtllm_disagg.engines.embedded.model.plain_model import places_by_plain_name, read_weights
from trtllm_disagg.engines.embedded.params.model_config import shown
from trtllm_disagg.engines.embedded.params.vision_config import of_tower
from trtllm_disagg.errors import ConfigError

_BLANK = Pixels(1, 1, bytes(3))


class VisionTower:
    def __init__(self, model: Any, processor: Any) -> None:
        """`model`: transformers' LlavaModel; its language model is not used."""
        self._model = model
        self._processor = processor

    @torch.inference_mode()
    def encode(self, image: Pixels) -> torch.Tensor:
        """(tokens per image, hidden) float32."""
        picture = Image.frombytes("RGB", (image.width, image.height), image.data)
        values = self._processor(images=picture, return_tensors="pt")["pixel_values"]
        vectors: torch.Tensor = self._model.get_image_features(values.float()).pooler_output[0]
        return vectors


def load_tower(directory: Path, num_tokens: int) -> VisionTower:
    """Raises ConfigError for a broken tower or processor."""
    try:
        tower = _load(directory)
        vectors = tower.encode(_BLANK)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many types
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model: cannot load the vision tower of {directory}: {reason}") from error
    if len(vectors) != num_tokens or not torch.isfinite(vectors).all():
        raise ConfigError(
            f"model: the vision tower of {directory} makes {len(vectors)} vectors of an image where config.json says "
            f"{num_tokens}, or numbers that are not finite; check the processor's configuration and the weights"
        )
    return tower


def _load(directory: Path) -> VisionTower:
    from transformers import AutoConfig, AutoImageProcessor, LlavaModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Our errors report what is missing.
    transformers_logging.set_verbosity_error()
    processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True, backend="pil")
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    # The language model runs on our own forward.
    config.text_config.update(
        {"num_hidden_layers": 0, "layer_types": [], "vocab_size": 1, "pad_token_id": None}
    )
    places = {name: place for name, place in places_by_plain_name(directory).items() if of_tower(name)}
    model, report = LlavaModel.from_pretrained(
        None,
        config=config,
        state_dict=dict(read_weights(directory, places)),
        dtype=torch.float32,
        output_loading_info=True,
    )
    lacking = sorted(name for name in report["missing_keys"] if of_tower(name))
    if wrong := lacking + sorted(report["unexpected_keys"]):
        raise ConfigError(f"model: {directory} lacks, or has beside its tower's, the weights {shown(wrong)}")
    return VisionTower(model.eval().requires_grad_(False), processor)
