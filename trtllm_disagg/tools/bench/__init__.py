"""`trtllm-disagg bench NAME`: one module for each benchmark, imported only when it is used.

Tables go to stdout, or with --json a list of figures; progress goes to stderr. A baseline is measured interleaved with
what it is compared with, because the speed of a machine changes from minute to minute.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from trtllm_disagg.cli import Command, Parser
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode, ending_as_on_ctrl_c

#: Each module has add_arguments(parser) and run(namespace) -> ExitCode.
BENCHMARKS = {
    "overhead": Command(
        "what the orders cost beside the frontend's own chain, with an engine that takes no time",
        "trtllm_disagg.tools.bench.overhead",
        "trtllm-disagg bench overhead --quick",
    ),
    "strategies": Command(
        "which order, with how many workers, for a model, GPUs and traffic, on modelled GPUs or real ones",
        "trtllm_disagg.tools.bench.strategies",
        "trtllm-disagg bench strategies --quick --model .cache/demo-model --out strategies",
    ),
}


class BenchmarkParser(Parser):
    """Adds the flags of its benchmark when it is used, since that imports many modules."""

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(**options)
        self._module = module
        self._is_filled = False

    def fill(self) -> None:
        if not self._is_filled:
            self._is_filled = True
            import_module(self._module).add_arguments(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        from trtllm_disagg.config.args import refuse_unknown_arguments

        self.fill()
        known, unknown = super().parse_known_args(args, namespace)
        # Here, because the parent parser has none of these flags.
        refuse_unknown_arguments(self, unknown)
        return known, unknown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(
        dest="benchmark", metavar="NAME", required=True, help="one of these", parser_class=BenchmarkParser
    )
    for name, benchmark in BENCHMARKS.items():
        benchmarks.add_parser(name, module=benchmark.module, **benchmark.described())


def prepare(arguments: list[str]) -> list[str]:
    """Raises ConfigError for a benchmark of earlier versions."""
    if arguments[:1] in (["engine"], ["transfer"], ["scenarios"]):
        (name,) = arguments[:1]
        raise ConfigError(f"bench {name} is gone since 0.2: use `python benchmarks/{name}.py` in a checkout")
    return arguments


def run(args: argparse.Namespace) -> ExitCode:
    """Exit status 0: measured, and every answer was right. A missed target is reported but is no failure."""
    with ending_as_on_ctrl_c():
        status: ExitCode = import_module(BENCHMARKS[args.benchmark].module).run(args)
        return status
