"""Loading a Llava checkpoint: older names of its weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cores import Core
from trtllm_disagg.engines.embedded.ipc.messages import Pixels
from trtllm_disagg.errors import ConfigError

Change = Callable[[Path], None]


def rename(directory: Path, *changes: tuple[str, str]) -> None:
    """Replace the starts of weights' names."""
    weights = load_file(directory / "model.safetensors")
    for old, new in changes:
        weights = {
            new + name.removeprefix(old) if name.startswith(old) else name: weight
            for name, weight in weights.items()
        }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def configure(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes",
    [
        [("vision_tower.", "vision_tower.vision_model.")],
        [
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head.", "lm_head."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ],
    ],
    ids=["before transformers 5", "as in memory"],
)
def test_weights_may_have_the_names_of_other_versions(
    llava: Path, tmp_path: Path, changes: list[tuple[str, str]]
) -> None:
    other = shutil.copytree(llava, tmp_path / "other")
    rename(other, *changes)
    cores = [Core(each) for each in (llava, other)]
    towers: list[Any] = [core.engine.images._tower for core in cores]
    image = Pixels(3, 2, bytes(range(18)))
    assert torch.equal(*(tower.encode(image) for tower in towers))
    answers = [core.generate([5, 6, 7]) for core in cores]
    assert answers[0] == answers[1]
    for core in cores:
        core.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: configure(d, text_config=None), "text_config: None is not allowed"),
        (lambda d: configure(d, image_token_index=258), r"image_token_index: 258 .* in \[0, 258\)"),
        (lambda d: configure(d, vision_config={"model_type": "siglip_vision_model"}), "clip_vision_model"),
        (lambda d: rename(d, ("vision_tower.", "vision_tower.x.")), "lacks, or has beside"),
        (lambda d: rename(d, ("language_model.lm_head.", "language_model.x.")), "lacks 1 weights"),
        (lambda d: (d / "preprocessor_config.json").unlink(), "cannot load the vision tower"),
    ],
    ids=["text", "token", "tower", "tower's weights", "head", "processor"],
)
def test_a_broken_model_is_refused_with_the_reason(
    llava: Path, tmp_path: Path, change: Change, reason: str
) -> None:
    broken = shutil.copytree(llava, tmp_path / "broken")
    change(broken)
    with pytest.raises(ConfigError, match=reason):
        Core(broken)


def test_the_forward_of_transformers_modules_is_refused(llava: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedded.forward: 'modules' .* for a model that takes images"):
        Core(llava, embedded={"forward": "transformers"})
