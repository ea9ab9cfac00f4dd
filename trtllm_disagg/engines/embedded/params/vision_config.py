"""The Llava layout of a checkpoint: a language model, a CLIP tower for images, and a projector between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from trtllm_disagg.engines.embedded.ipc.messages import ImageTokens
from trtllm_disagg.errors import ConfigError

MODEL_TYPE = "llava"
_TOWER = "clip_vision_model"
#: Start of a weight's name in a file, and in a checkpoint of the language model alone: transformers has written all.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
_VISION = ("vision_tower.", "multi_modal_projector.")
#: Keys beside text_config that also hold for the language model.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")

T = TypeVar("T")


def language_config(file: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """`raw`, the content of `file`, as config.json of the language model alone. Raises ConfigError without one."""
    if raw.get("model_type") != MODEL_TYPE:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError.bad_value(f"{file} text_config", text, "an object")
    shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    is_tied = bool(raw.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return text | shared | {"tie_word_embeddings": is_tied}


def image_tokens(file: Path, raw: dict[str, Any], vocab_size: int) -> ImageTokens | None:
    """None for a model without a tower. Raises ConfigError for a tower that is not served."""
    if raw.get("model_type") != MODEL_TYPE:
        return None
    token_id, tower = raw.get("image_token_index", raw.get("image_token_id")), raw.get("vision_config")
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ConfigError.bad_value(f"{file} image_token_index", token_id, f"a token id in [0, {vocab_size})")
    if not isinstance(tower, dict) or tower.get("model_type") != _TOWER:
        raise ConfigError.bad_value(f"{file} vision_config", tower, f"an object with model_type {_TOWER}")
    size, patch = tower.get("image_size"), tower.get("patch_size")
    if type(size) is not int or type(patch) is not int or not 1 <= patch <= size:
        allowed = "positive integers, patch_size not above image_size"
        raise ConfigError.bad_value(f"{file} vision_config image_size, patch_size", (size, patch), allowed)
    # "full" keeps the tower's class token.
    is_full = raw.get("vision_feature_select_strategy") == "full"
    return ImageTokens(token_id, (size // patch) ** 2 + is_full)


def plain_name(name: str) -> str:
    """A weight's name as a checkpoint of the language model alone has it."""
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def of_tower(name: str) -> bool:
    """True for the plain name of a weight of tower or projector."""
    return name.startswith(_VISION)


def language_weights(found: Mapping[str, T]) -> dict[str, T]:
    """`found` by plain names, without the weights of tower and projector."""
    named = {plain_name(name): value for name, value in found.items()}
    return {name: value for name, value in named.items() if not of_tower(name)}
