"""A small model trained on the spot, to try everything without a download.

`build_demo_model` trains a Llama for about a minute on Python's documentation. It answers in English about Python, not
reliably. With `--vision` it is a Llava, which also names the colour and the shape of what `drawings.draw` draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.engines.demo_model.recipe import DEFAULT_RECIPE, VISION_RECIPE, Recipe
from trtllm_disagg.errors import ConfigError

__all__ = ["DEFAULT_RECIPE", "VISION_RECIPE", "Recipe", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="directory for the model; created if missing"
    )
    parser.add_argument("--vision", action="store_true", help="train a model that also sees images")


def run(args: argparse.Namespace) -> ExitCode:
    """Build the model. Returns exit status 0."""
    # Imported here: `--help` does not need it.
    from trtllm_disagg.engines.demo_model.building import build_demo_model

    try:
        build_demo_model(args.directory, recipe=VISION_RECIPE if args.vision else DEFAULT_RECIPE)
    except OSError as error:
        raise ConfigError(f"DIR: cannot make a model at {args.directory}: {error}") from error
    return ExitCode.DONE
