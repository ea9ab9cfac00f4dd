"""`trtllm-disagg demo`: one streamed chat completion in each order, and when which worker did what.

It runs real processes: Dynamo's frontend, a prefill and a decode worker, with KV moving between them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.config.settings import positive
from trtllm_disagg.engines.demo_model.recipe import DEFAULT_DIRECTORY
from trtllm_disagg.processes.exits import ExitCode, ending_as_on_ctrl_c

QUESTION = "What is a list?"
_DEFAULT_CONFIGS = Path("engine_configs/demo")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_DIRECTORY,
        help="directory, made when missing, or Hugging Face name (default: %(default)s)",
    )
    parser.add_argument(
        "--question", default=QUESTION, help="what is asked, once in each order (default: %(default)r)"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=60, help="of the answer (default: %(default)s)"
    )
    parser.add_argument(
        "--engine-configs",
        type=Path,
        default=_DEFAULT_CONFIGS,
        help="used when it is there (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """The exit status: 0 when both orders answered, and answered the same."""
    # Imported here because `--help` needs none of it.
    from trtllm_disagg.tools.demo.both_orders import show_both_orders

    with ending_as_on_ctrl_c():
        return show_both_orders(args)
