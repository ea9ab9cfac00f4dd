"""`trtllm-disagg doctor`: checks this machine for TensorRT-LLM, a pair of engine YAML files before they run, or, with
`--url`, a running deployment.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config.worker_config import Role, choices_of
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, TrtllmVersion, installed_version
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import disaggregated
from trtllm_disagg.tools.flag_types import more_than_zero
from trtllm_disagg.tools.up.gpus import ROLE_VARIABLES, parse_gpus

if TYPE_CHECKING:
    from trtllm_disagg.tools.doctor.pair import Pair, Stage
    from trtllm_disagg.tools.doctor.rules import Finding

_ROLES = (Role.PREFILL, Role.DECODE)


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
    add("--url", help="check the running deployment behind this frontend; sends a few short requests")
    add(
        "--model",
        metavar="NAME",
        help="model directory, for `auto` dtypes and the model's length; with --url: name of the model",
    )
    add(
        "--trtllm-version",
        metavar="VERSION",
        help=f"version of TensorRT-LLM (default: the installed one, else {NEWEST_KNOWN})",
    )
    of_both = "flag of both workers (default: %(default)s)"
    add("--strategy", choices=disaggregated(), default="decode_first", help=of_both)
    add("--schedule-style", choices=choices_of("schedule_style"), default="context_first", help=of_both)
    add("--kv-block-size", type=int, metavar="N", help="tokens per block at the router (default: the files')")
    for role in _ROLES:
        add(
            f"--{role}-flags",
            type=shlex.split,
            default=[],
            metavar="'...'",
            help=f"{role} flags besides its file, or its full command line",
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
        help="with --url: max time per request (default: %(default)g)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add(
        "--report",
        action="store_true",
        help="print machine, versions and engine arguments as one text to paste, without secrets",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Returns FAILED when a finding is an error. Raises ConfigError for bad usage, and for a URL without a frontend."""
    files = [file for file in (args.prefill, args.decode) if file is not None]
    if args.url is not None:
        if files:
            raise ConfigError.bad_value("--url", args.url, "a URL without files")
        return _of_deployment(args)
    flags = [each for each in (args.prefill_flags, args.decode_flags) if each]
    if not files and not flags:
        return _of_machine(args)
    if len(files) < len(_ROLES) and (files or len(flags) < len(_ROLES)):
        raise ConfigError(
            "give the YAML files of a prefill and a decode worker, or --prefill-flags and --decode-flags, or --url; "
            "without arguments, doctor checks this machine"
        )
    return _of_files(args)


def _of_machine(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.tools.doctor.machine import findings

    return _shown(args, findings(os.environ), ("",), "this machine", {})


def _of_deployment(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.common.steadily import without_silence
    from trtllm_disagg.tools.admin.fleet import say
    from trtllm_disagg.tools.doctor.deployment import findings, look
    from trtllm_disagg.tools.top.frontend import FrontendClient
    from trtllm_disagg.tools.top.observers import observer_of

    frontend = FrontendClient(args.url, args.timeout)
    with without_silence(say, f"asking {frontend.url}") as report:
        seen = look(frontend, observer_of(None, args.url), args.model, report)
    title, about = f"{seen.model} at {seen.url}", {"url": seen.url, "model": seen.model}
    return _shown(args, findings(seen), (seen.url,), title, about)


def _of_files(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.tools.doctor.diagnosis import diagnose
    from trtllm_disagg.tools.doctor.machine import findings
    from trtllm_disagg.tools.doctor.pair import Pair

    version = _version(args.trtllm_version)
    prefill, decode = (_stage(args, role, version) for role in _ROLES)
    pair = Pair(prefill, decode, version, os.environ, args.kv_block_size)
    rows = diagnose(pair)
    if args.report or installed_version():
        rows += findings(os.environ)
    columns = [f"{stage.role} {stage.source}" for stage in pair.stages]
    about = {stage.role.value: stage.source for stage in pair.stages}
    about |= {"trtllm_version": str(version), "strategy": pair.strategy}
    return _shown(args, rows, columns, f"TensorRT-LLM {version}, {pair.strategy}", about, pair)


def _shown(
    args: argparse.Namespace,
    found: list[Finding],
    columns: Sequence[str],
    title: str,
    about: Mapping[str, str],
    pair: Pair | None = None,
) -> ExitCode:
    """`columns` and `title`: of the table. `about`: what was checked, in JSON."""
    from trtllm_disagg.tools.doctor.diagnosis import has_errors, show, to_json
    from trtllm_disagg.tools.doctor.machine import report

    if args.report:
        print(report(found, os.environ, pair))
    elif args.json:
        print(to_json(about, found))
    else:
        show(found, columns, title)
    return ExitCode.FAILED if has_errors(found) else ExitCode.DONE


def _stage(args: argparse.Namespace, role: Role, version: TrtllmVersion) -> Stage:
    from trtllm_disagg.config.yaml_file import read_mapping, shipped
    from trtllm_disagg.tools.doctor.pair import settings_of, stage_of

    words, file = getattr(args, f"{role}_flags"), getattr(args, role.value)
    read = partial(settings_of, role, strategy=args.strategy, schedule_style=args.schedule_style)
    if other := read(words).extra_engine_args:
        if file is not None:
            raise ConfigError(f"--{role}-flags: --extra-engine-args {other} and {file}: give one of them")
        file = Path(other)
    # An empty --extra-engine-args lets the variables apply.
    config = read([*words, f"--extra-engine-args={file or ''}"])
    source, given = ("", {}) if file is None else (str(shipped(file)), read_mapping(file, role.value))
    return stage_of(config, source, given, version, os.environ, args.model, _gpus(args, role))


def _version(given: str | None) -> TrtllmVersion:
    if given is not None:
        return TrtllmVersion.parse(given)
    installed = installed_version()
    return TrtllmVersion.parse(installed, "the installed TensorRT-LLM") if installed else NEWEST_KNOWN


def _gpus(args: argparse.Namespace, role: Role) -> tuple[str, ...]:
    given, variable = getattr(args, f"{role}_gpus"), ROLE_VARIABLES[role]
    key, given = (f"--{role}-gpus", given) if given else (variable, os.environ.get(variable))
    return parse_gpus(key, given) if given else ()
