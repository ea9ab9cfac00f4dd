"""`trtllm-disagg completion`: prints a script with which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

from trtllm_disagg.cli import COMMANDS, Parser
from trtllm_disagg.config.args import actions_of
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.bench import BenchmarkParser

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError where shtab is not installed."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError(
            "completion needs shtab; pip install 'trtllm-disagg[completion]' brings it"
        ) from None
    print(shtab.complete(whole_parser(), args.shell))
    return ExitCode.DONE


def whole_parser() -> Parser:
    """`trtllm-disagg` with all its commands and their flags."""
    whole = Parser(prog="trtllm-disagg", allow_abbrev=False)
    commands = whole.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        import_module(command.module).add_arguments(commands.add_parser(name, **command.described()))
    for each in parsers_of(whole):
        if isinstance(each, BenchmarkParser):
            each.fill()
    return whole


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser itself and, recursively, the parsers of its commands."""
    yield parser
    for action in actions_of(parser):
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_of(each)
