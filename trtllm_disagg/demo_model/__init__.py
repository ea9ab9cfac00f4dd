"""A small model made on the spot, so that everything can be tried without a download.

`build_demo_model` trains a Llama for about a minute on Python's own documentation. What it says is English-like, about
Python, and not to be trusted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trtllm_disagg.demo_model.build import build_demo_model
from trtllm_disagg.demo_model.recipe import DEFAULT_RECIPE, Recipe
from trtllm_disagg.errors import ConfigError

__all__ = ["DEFAULT_RECIPE", "Recipe", "add_arguments", "build_demo_model", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="folder for the model; made if it is not there"
    )


def run(args: argparse.Namespace) -> int:
    """The exit status: 0 when the model is there, 2 when DIR cannot be used."""
    try:
        build_demo_model(args.directory)
    except (ConfigError, OSError) as error:
        print(f"demo-model: {error}", file=sys.stderr)
        return 2
    return 0
