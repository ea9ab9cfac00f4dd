"""`trtllm-disagg doctor`: do two engine YAML files make a pair? Asked before a GPU is touched."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from trtllm_disagg.config.worker_config import Role, ScheduleStyle
from trtllm_disagg.engine.trtllm_version import NEWEST_KNOWN, TrtllmVersion, installed_version
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import disaggregated

#: As Dynamo's launch scripts name them.
_GPU_VARIABLES = {Role.PREFILL: "PREFILL_CUDA_VISIBLE_DEVICES", Role.DECODE: "DECODE_CUDA_VISIBLE_DEVICES"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for role in (Role.PREFILL, Role.DECODE):
        add(
            role.value,
            type=Path,
            metavar=f"{role.upper()}.yaml",
            help=f"engine arguments of the {role} worker",
        )
    add("--model", metavar="DIR", help="model directory: resolves `auto` dtypes and the model's length")
    add(
        "--trtllm-version",
        metavar="VERSION",
        help=f"whose rules hold (default: the installed one, else {NEWEST_KNOWN})",
    )
    add("--strategy", choices=disaggregated(), default="decode_first", help="default: %(default)s")
    add(
        "--schedule-style",
        choices=[style.value for style in ScheduleStyle],
        default=ScheduleStyle.CONTEXT_FIRST.value,
        help="default: %(default)s",
    )
    add("--kv-block-size", type=int, metavar="N", help="of the router (default: as the files say)")
    for role, variable in _GPU_VARIABLES.items():
        add(f"--{role}-gpus", metavar="0,1", help=f"GPUs of the {role} worker (default: {variable})")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 when no rule is broken, 1 when one is; notes break none. Raises ConfigError for bad usage."""
    from trtllm_disagg.doctor.diagnosis import diagnose, has_errors
    from trtllm_disagg.doctor.pair import Deployment, Pair, read_side
    from trtllm_disagg.doctor.report import show, to_json

    deployment = Deployment(
        _version(args.trtllm_version),
        args.strategy,
        args.schedule_style,
        args.kv_block_size,
        dict(os.environ),
    )
    prefill, decode = (
        read_side(role, getattr(args, role.value), args.model, deployment, _gpus(args, role))
        for role in _GPU_VARIABLES
    )
    pair = Pair(prefill, decode, deployment)
    rows = diagnose(pair)
    if args.json:
        print(to_json(pair, rows))
    else:
        show(pair, rows)
    return 1 if has_errors(rows) else 0


def _version(given: str | None) -> TrtllmVersion:
    if given is not None:
        return TrtllmVersion.parse(given)
    installed = installed_version()
    return TrtllmVersion.parse(installed, "the installed TensorRT-LLM") if installed else NEWEST_KNOWN


def _gpus(args: argparse.Namespace, role: Role) -> tuple[str, ...]:
    given = getattr(args, f"{role}_gpus") or os.environ.get(_GPU_VARIABLES[role], "")
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    if len(set(names)) != len(names):
        raise ConfigError.bad_value(f"--{role}-gpus", given, "each GPU once")
    return names
