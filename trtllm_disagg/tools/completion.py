"""`trtllm-disagg completion`: prints a completion script for a shell."""

from __future__ import annotations

import argparse
from importlib import import_module

from trtllm_disagg.common.cli import COMMANDS, Parser
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(args: argparse.Namespace) -> ExitCode:
    """Raises ConfigError when shtab is not installed."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError("completion needs shtab: pip install 'trtllm-disagg[completion]'") from None
    print(shtab.complete(whole_parser(), args.shell))
    return ExitCode.DONE


def whole_parser() -> Parser:
    """The parser of `trtllm-disagg`, with all commands and flags."""
    whole = Parser(prog="trtllm-disagg", allow_abbrev=False)
    commands = whole.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for name, command in COMMANDS.items():
        import_module(command.module).add_arguments(commands.add_parser(name, **command.described()))
    return whole
