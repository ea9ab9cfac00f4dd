"""`trtllm-disagg demo`: streams one chat completion in each order, and shows which worker did what and when.

It runs real processes: Dynamo's frontend, a prefill worker and a decode worker, which exchange KV.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.common.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.engines.demo_model.recipe import DEFAULT_DIRECTORY, DEFAULT_VISION_DIRECTORY
from trtllm_disagg.tools.flag_types import positive

QUESTION, QUESTION_ABOUT_IMAGE = "What is a list?", "What is in the image?"
_DEFAULT_CONFIGS = Path("engine_configs/demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="directory (created if missing) or name on the Hugging Face hub "
        f"(default: {DEFAULT_DIRECTORY}; with --image {DEFAULT_VISION_DIRECTORY})",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        nargs="?",
        const=Path(),
        help="ask about a PNG, JPEG or WEBP file; without FILE about a drawing",
    )
    parser.add_argument(
        "--question",
        help=f"question to ask in each order (default: {QUESTION!r}; with --image {QUESTION_ABOUT_IMAGE!r})",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=60, help="max tokens of the answer (default: %(default)s)"
    )
    parser.add_argument(
        "--engine-configs",
        type=Path,
        default=_DEFAULT_CONFIGS,
        help="engine files, if they exist (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 when both orders gave the same answer."""
    from trtllm_disagg.tools.demo.both_orders import show_both_orders

    sees = args.image is not None
    args.model = args.model or (DEFAULT_VISION_DIRECTORY if sees else DEFAULT_DIRECTORY)
    args.question = args.question or (QUESTION_ABOUT_IMAGE if sees else QUESTION)
    with ending_as_on_ctrl_c():
        return show_both_orders(args)
