"""A small model that is trained on the spot, so that everything can be tried without a download.

`build_demo_model` trains a Llama for about a minute on Python's own documentation. Its answers read like English, are
about Python, and are not reliable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.engines.demo_model.recipe import DEFAULT_RECIPE, Recipe
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode

__all__ = ["DEFAULT_RECIPE", "Recipe", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="folder for the model; made if it is not there"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Exit status 0: the directory has the model."""
    # Imported here because `--help` needs none of it.
    from trtllm_disagg.engines.demo_model.building import build_demo_model

    try:
        build_demo_model(args.directory)
    except OSError as error:
        raise ConfigError(f"DIR: cannot make a model at {args.directory}: {error}") from error
    return ExitCode.DONE
