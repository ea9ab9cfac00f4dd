"""`trtllm-disagg doctor`: can this machine run TensorRT-LLM; do two engine YAML files make a pair, asked before a GPU
is touched; or, with `--url`, does a deployment that serves do what it should?
"""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.config.settings import more_than_zero
from trtllm_disagg.config.worker_config import Role, ScheduleStyle
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, TrtllmVersion, installed_version
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.strategies import disaggregated
from trtllm_disagg.tools.up.gpus import ROLE_VARIABLES, parse_gpus

if TYPE_CHECKING:
    from trtllm_disagg.tools.doctor.pair import PlannedDeployment, Side

_ROLES = (Role.PREFILL, Role.DECODE)
#: Names in JSON for the numbers of these verdicts.
_COUNTED = {"errors": "error", "notes": "note"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for role in _ROLES:
        add(
            role.value,
            type=Path,
            nargs="?",
            metavar=f"{role.upper()}.yaml",
            help=f"engine arguments of the {role} worker",
        )
    add(
        "--url",
        help="instead of files: the frontend of a deployment that serves; sends it some short requests",
    )
    add(
        "--model",
        metavar="NAME",
        help="model directory: resolves `auto` dtypes and the model's length; with --url: which of its models",
    )
    add(
        "--trtllm-version",
        metavar="VERSION",
        help=f"version with the rules to apply (default: the installed one, else {NEWEST_KNOWN})",
    )
    add("--strategy", choices=disaggregated(), default="decode_first", help="default: %(default)s")
    add(
        "--schedule-style",
        choices=[style.value for style in ScheduleStyle],
        default=ScheduleStyle.CONTEXT_FIRST.value,
        help="default: %(default)s",
    )
    add("--kv-block-size", type=int, metavar="N", help="of the router (default: as the files say)")
    for role in _ROLES:
        add(
            f"--{role}-flags",
            type=shlex.split,
            default=[],
            metavar="'...'",
            help=f"the {role} worker's flags, or its whole command line: with its file, or instead of one",
        )
        add(
            f"--{role}-gpus",
            metavar="0,1",
            help=f"GPUs of the {role} worker (default: {ROLE_VARIABLES[role]})",
        )
    add(
        "--timeout",
        type=more_than_zero,
        default=60.0,
        metavar="SECONDS",
        help="with --url: for one request (default: %(default)g)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add(
        "--report",
        action="store_true",
        help="print one text to paste, without secrets: this machine, its versions, and the files' engine arguments",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """The exit code: 0 when no rule is broken, 1 when one is; what is a note or not known breaks none.

    Raises ConfigError for bad usage, and for a URL without a frontend.
    """
    files = [file for file in (args.prefill, args.decode) if file is not None]
    if args.url is not None:
        if files:
            raise ConfigError.bad_value("--url", args.url, "either a URL or two files")
        return _of_deployment(args)
    flags = [each for each in (args.prefill_flags, args.decode_flags) if each]
    if not files and not flags:
        return _of_machine(args)
    if len(files) < len(_ROLES) and (files or len(flags) < len(_ROLES)):
        raise ConfigError(
            "doctor needs the YAML files of a prefill and a decode worker, or --prefill-flags and --decode-flags, "
            "or --url; without any of them it looks at this machine"
        )
    return _of_files(args)


def _of_machine(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.tools.doctor.diagnosis import has_errors, show, to_json
    from trtllm_disagg.tools.doctor.machine import findings, report

    found = findings(os.environ)
    if args.report:
        print(report(found, os.environ))
    elif args.json:
        print(to_json({}, found, _COUNTED))
    else:
        show(found, ("",), "this machine")
    return ExitCode.FAILED if has_errors(found) else ExitCode.DONE


def _of_deployment(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.processes.steadily import without_silence
    from trtllm_disagg.tools.admin import client
    from trtllm_disagg.tools.doctor.deployment import findings, look
    from trtllm_disagg.tools.doctor.diagnosis import has_errors, show, to_json
    from trtllm_disagg.tools.doctor.rules import UNKNOWN
    from trtllm_disagg.tools.top.frontend import FrontendClient
    from trtllm_disagg.tools.top.observers import observer_of

    frontend = FrontendClient(args.url, args.timeout)
    with without_silence(client.say, f"asking {frontend.url}") as say:
        seen = look(frontend, observer_of(None, args.url), args.model, say)
    found = findings(seen)
    if args.json:
        print(to_json({"url": seen.url, "model": seen.model}, found, _COUNTED | {"not_known": UNKNOWN}))
    else:
        show(found, (seen.url,), f"{seen.model} at {seen.url}")
    return ExitCode.FAILED if has_errors(found) else ExitCode.DONE


def _of_files(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.tools.doctor.diagnosis import diagnose, has_errors, show, to_json
    from trtllm_disagg.tools.doctor.machine import findings, report
    from trtllm_disagg.tools.doctor.pair import Pair, PlannedDeployment

    deployment = PlannedDeployment(
        _version(args.trtllm_version),
        args.strategy,
        args.schedule_style,
        args.kv_block_size,
        dict(os.environ),
    )
    prefill, decode = (_side(args, role, deployment) for role in _ROLES)
    asked_for = prefill.config
    deployment = replace(
        deployment, strategy=asked_for.strategy, schedule_style=asked_for.schedule_style.value
    )
    pair = Pair(prefill, decode, deployment)
    rows = diagnose(pair)
    if args.report or installed_version():
        rows += findings(os.environ)
    if args.report:
        print(report(rows, os.environ, pair))
    elif args.json:
        about = {side.role.value: side.source for side in pair.sides}
        about |= {"trtllm_version": str(deployment.trtllm_version), "strategy": deployment.strategy}
        print(to_json(about, rows, _COUNTED))
    else:
        columns = [f"{side.role} {side.source}" for side in pair.sides]
        show(rows, columns, f"TensorRT-LLM {deployment.trtllm_version}, {deployment.strategy}")
    return ExitCode.FAILED if has_errors(rows) else ExitCode.DONE


def _side(args: argparse.Namespace, role: Role, deployment: PlannedDeployment) -> Side:
    from trtllm_disagg.config.yaml_file import read_mapping, shipped
    from trtllm_disagg.tools.doctor.pair import settings_of, side_of

    config = settings_of(
        role, getattr(args, f"{role}_flags"), strategy=args.strategy, schedule_style=args.schedule_style
    )
    file: Path | None = getattr(args, role.value)
    if config.extra_engine_args:
        if file is not None:
            raise ConfigError(
                f"--{role}-flags: --extra-engine-args {config.extra_engine_args} and the file {file}: give one of them"
            )
        file = Path(config.extra_engine_args)
    source, given = ("", {}) if file is None else (str(shipped(file)), read_mapping(file, role.value))
    return side_of(role, source, given, args.model, deployment, _gpus(args, role), config)


def _version(given: str | None) -> TrtllmVersion:
    if given is not None:
        return TrtllmVersion.parse(given)
    installed = installed_version()
    return TrtllmVersion.parse(installed, "the installed TensorRT-LLM") if installed else NEWEST_KNOWN


def _gpus(args: argparse.Namespace, role: Role) -> tuple[str, ...]:
    key, given = f"--{role}-gpus", getattr(args, f"{role}_gpus")
    if not given:
        key = ROLE_VARIABLES[role]
        given = os.environ.get(key)
    return parse_gpus(key, given) if given else ()
