"""Builds a demo model in a folder: once, completely, and safe against a kill or a second builder."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.common.console import Console
from trtllm_disagg.common.steadily import SECONDS, steadily
from trtllm_disagg.engines.demo_model.corpus import (
    articles,
    documents,
    image_documents,
    save_tokenizer,
    train_tokenizer,
)
from trtllm_disagg.engines.demo_model.recipe import DEFAULT_RECIPE, Recipe, VisionRecipe
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from trtllm_disagg.engines.demo_model.training import Report

# Written last, so this file proves a complete folder.
MARKER = "demo_model.json"


def say(text: str) -> None:
    Console(soft_wrap=True).print(f"demo-model: {text}", markup=False)


def line_report(clock: Callable[[], float] = time.monotonic) -> Report:
    """Prints a line every few seconds."""
    first = last = 0.0

    def report(step: int, steps: int, loss: float) -> None:
        nonlocal first, last
        now = clock()
        if step == 1:
            # Excludes the first step, a warm-up, from the estimate.
            first = last = now
            say(f"step {step}/{steps}, loss {loss:.2f}")
        elif now - last >= SECONDS or step == steps:
            last = now
            left = (now - first) / (step - 1) * (steps - step)
            say(f"step {step}/{steps}, loss {loss:.2f}, {left:.0f} s left")

    return report


def build_demo_model(directory: Path, *, recipe: Recipe = DEFAULT_RECIPE) -> Path:
    """Make the model in `directory`, in about a minute, unless it exists. Returns the path.

    Replaces a demo model of another recipe. Raises ConfigError for a folder with anything else.
    """
    given, directory = directory, Path(os.path.expanduser(directory)).absolute()
    if is_complete(directory, recipe):
        say(f"{given} is up to date")
        return directory
    refuse_foreign_folder(directory)
    say(f"making a model in {given}, once; it takes about a minute")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with only_builder(directory):
        if is_complete(directory, recipe):
            say(f"{given} was just made by another process")
            return directory
        unfinished = empty_sibling(directory, "unfinished")
        make_model(unfinished, recipe)
        put_in_place(unfinished, directory)
    say(f"{given} is ready")
    return directory


def is_complete(directory: Path, recipe: Recipe) -> bool:
    try:
        marker = json.loads((directory / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("digest") == recipe.digest


def refuse_foreign_folder(directory: Path) -> None:
    if not directory.exists() or (directory / MARKER).is_file():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise ConfigError.bad_value(
            "DIR", str(directory), "a new or empty folder, or one that holds a demo model"
        )


def make_model(directory: Path, recipe: Recipe) -> None:
    with steadily("reading Python's documentation", say):
        source = articles()
        corpus = documents(source, random.Random(recipe.seed))
    with steadily("making a tokenizer", say):
        if isinstance(recipe, VisionRecipe):
            corpus += image_documents(random.Random(recipe.seed))
        tokenizer = train_tokenizer(corpus, recipe.vocab_size, sees=isinstance(recipe, VisionRecipe))
    # Set before torch loads: spinning threads make training three times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with steadily("loading torch", say):
        from trtllm_disagg.engines.demo_model.training import save_weights, train
    say(f"training on {len(corpus)} documents, {recipe.steps} steps of {recipe.batch * recipe.window} tokens")
    if isinstance(recipe, VisionRecipe):
        from trtllm_disagg.engines.demo_model import vision

        model = vision.train(recipe, source, tokenizer, line_report())
        vision.save_processor(directory)
    else:
        model = train(recipe, source, tokenizer, line_report())
    save_weights(model, directory)
    save_tokenizer(tokenizer, directory, recipe)
    (directory / MARKER).write_text(json.dumps(recipe.marker(), indent=2))


@contextmanager
def only_builder(directory: Path) -> Iterator[None]:
    """Wait for any other builder of the folder. The kernel drops a dead builder's lock."""
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def empty_sibling(directory: Path, purpose: str) -> Path:
    """A new folder beside `directory`, so that a rename stays within one file system."""
    sibling = directory.parent / f".{directory.name}.{purpose}"
    shutil.rmtree(sibling, ignore_errors=True)
    sibling.mkdir()
    return sibling


def put_in_place(finished: Path, directory: Path) -> None:
    """Replace the model. A reader sees the old one, none for an instant, then the new one; never a mixture."""
    outdated = empty_sibling(directory, "outdated")
    if directory.exists():
        directory.rename(outdated)
    finished.rename(directory)
    shutil.rmtree(outdated, ignore_errors=True)
