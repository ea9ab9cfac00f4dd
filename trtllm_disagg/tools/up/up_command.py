"""`trtllm-disagg up`: flags to `DeploymentConfig`, and the run itself."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from trtllm_disagg.cli import parsed
from trtllm_disagg.config.args import argument_parser_of, read_worker_flags
from trtllm_disagg.config.worker_config import SETTINGS, choices_of, flag_of
from trtllm_disagg.config.yaml_file import shipped
from trtllm_disagg.engine.engines import resolve_engine
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.model_directory import servable_model
from trtllm_disagg.processes.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.processes.interpreter import environment
from trtllm_disagg.strategies import STRATEGIES, spec_of
from trtllm_disagg.tools.up.gpus import ROLE_VARIABLES
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    GPU_STARTUP_SECONDS,
    STARTUP_SECONDS,
    DeploymentConfig,
    ProcessRole,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = DeploymentConfig
    add = parser.add_argument
    add("--strategy", required=True, choices=STRATEGIES, help="which stage takes the request first")
    add("--model", required=True, help="model directory or Hugging Face name")
    add("--served-model-name", help="name for clients (default: the name of the model directory)")
    add("--prefill-workers", type=int, metavar="N", help=f"how many (default: {default.prefill_workers})")
    add("--decode-workers", type=int, metavar="N", help=f"how many (default: {default.decode_workers})")
    add("--agg-workers", type=int, metavar="N", help=f"only with agg (default: {default.agg_workers})")
    add("--engine", help="which module offers the LLM API (default: the worker's)")
    add(
        "--engine-configs",
        type=Path,
        metavar="DIR",
        help="directory with agg.yaml, or prefill.yaml and decode.yaml (default: on TensorRT-LLM those that fit the "
        "model's name, else none)",
    )
    add(
        "--flex",
        action="store_true",
        help="flex.yaml for both roles, so that every worker may flip (default: prefill.yaml and decode.yaml)",
    )
    add(
        "--kv-block-size",
        type=int,
        metavar="TOKENS",
        help="for all workers and the router (default: the engine's)",
    )
    add(
        "--next-router",
        choices=choices_of("next_router"),
        help="how a worker chooses the one that it calls (default: the worker's, round_robin)",
    )
    add(
        "--prefill-dispatch",
        choices=choices_of("prefill_dispatch"),
        help="queue: prefill workers pull from a queue on NATS, which `up` starts "
        f"(default: {default.prefill_dispatch}) [{SETTINGS['prefill_dispatch'].variables[0]}]",
    )
    add(
        "--startup-timeout",
        type=float,
        metavar="SECONDS",
        help=f"how long the start may take (default: {STARTUP_SECONDS:g}; with GPUs {GPU_STARTUP_SECONDS:g})",
    )
    drain = SETTINGS["drain_seconds"]
    add(
        flag_of("drain_seconds"),
        type=argument_parser_of("drain_seconds"),
        metavar="SECONDS",
        help="how long a worker that leaves waits for its requests; then other workers go on with them "
        f"(default: {SETTINGS['drain_seconds'].default:g}) [{drain.variables[0]}]",
    )
    add("--http-host", default=default.http_host, help="where the frontend listens (default: %(default)s)")
    add(
        "--http-port",
        type=int,
        default=default.http_port,
        metavar="PORT",
        help="0 takes any free port (default: %(default)s)",
    )
    add("--namespace", default=default.namespace, help="Dynamo namespace (default: %(default)s)")
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="logs and processes.json (default: a temporary directory, kept when something failed)",
    )
    add(
        "--gpus",
        dest="gpu_devices",
        metavar="LIST",
        help="GPUs for the workers, as CUDA numbers them: each gets as many of its own as its engine config says "
        f"(default: {', '.join(ROLE_VARIABLES[role] for role in ('prefill', 'decode'))}, or CUDA_VISIBLE_DEVICES, or "
        "all of the machine; only --engine tensorrt_llm)",
    )
    add(
        "--stop-timeout",
        type=float,
        metavar="SECONDS",
        help=f"when a process that was told to stop is killed (default: {BEYOND_DRAIN_SECONDS:g} s after draining, and "
        f"with GPUs also {flag_of('engine_health_shutdown_timeout')})",
    )
    add(
        "--no-restart",
        dest="restart",
        action="store_false",
        help="a process that dies is not started again (default: it is, after 1, 2, 4 ... 30 s)",
    )
    add_worker_args(parser)
    _add_flags_for(parser, "--frontend-args", "dynamo.frontend")
    _add_flags_for(
        parser, "--autoscale", "`trtllm-disagg autoscale`, which then runs beside it", _check_autoscale
    )


def add_worker_args(parser: argparse.ArgumentParser) -> None:
    _add_flags_for(parser, "--worker-args", "every worker", read_worker_flags)


def _check_autoscale(words: list[str]) -> None:
    parsed("autoscale", "--run-dir", "", *words)


def _add_flags_for(
    parser: argparse.ArgumentParser, flag: str, program: str, check: Callable[[list[str]], object] = list
) -> None:
    """Add a flag that takes flags of another program (`cli.TAKE_FLAGS`). `check` raises ConfigError for wrong ones."""

    def read(text: str) -> list[str]:
        try:
            words = shlex.split(text)
            check(words)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{flag}: {error}") from None
        return words

    parser.add_argument(
        flag,
        type=read,
        default=[],
        metavar="'...'",
        help=f"more arguments for {program} (one alone: {flag}=--flag)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Returns the exit code of `serve`."""
    from trtllm_disagg.tools.up.run_dir import scratch_directory

    if args.run_dir is not None:
        return _serve(config_from(args, args.run_dir))
    # Until `serve` listens to these signals itself.
    with ending_as_on_ctrl_c(), scratch_directory("trtllm-disagg-") as scratch:
        code = _serve(config_from(args, scratch.path))
        scratch.is_kept = code is ExitCode.FAILED
        return code


def _serve(config: DeploymentConfig) -> ExitCode:
    # Imported only after the flags are checked; `--help` does not need them.
    import asyncio

    from trtllm_disagg.config.engine_args import ENGINE_KEYS
    from trtllm_disagg.tools.up.lifecycle import serve
    from trtllm_disagg.tools.up.status import status_for
    from trtllm_disagg.tools.up.workers import check_workers, parsed_workers

    name, config = default_name(config.model), replace(config, model=str(servable_model(config.model)))
    status = status_for(sys.stderr)
    environ = environment()
    workers = parsed_workers(config, environ)
    # A file would beat the engine's flags.
    flags = ENGINE_KEYS.keys() - {"model"} | {"extra_engine_args"}
    by_flags = any(worker.is_explicit(name) for worker in workers for name in flags)
    if not by_flags and all(resolve_engine(worker.engine) == "tensorrt_llm" for worker in workers):
        chosen, told = engine_configs_for(name, config.strategy, flex=config.flex)
        config = replace(config, engine_configs=chosen)
        status.note(told)
    if config.flex and not config.engine_configs:
        raise ConfigError.bad_value("--flex", True, "--engine-configs DIR beside it, with flex.yaml")
    check_workers(config, environ)
    return asyncio.run(serve(config, status))


def config_from(args: argparse.Namespace, run_dir: Path) -> DeploymentConfig:
    """The configuration from the flags, which are named after its fields."""
    values = {
        field.name: getattr(args, field.name) for field in fields(DeploymentConfig) if field.name in args
    }
    for role in get_args(ProcessRole):
        if values.get(f"{role}_workers", 0) is None:
            del values[f"{role}_workers"]
        elif f"{role}_workers" in values and role not in spec_of(args.strategy).roles:
            fitting = ", ".join(name for name, spec in STRATEGIES.items() if role in spec.roles)
            allowed = f"--strategy {fitting}, not {args.strategy}"
            raise ConfigError.bad_value(f"--{role}-workers", values[f"{role}_workers"], allowed)
    configs = (
        engine_configs_in(args.engine_configs, args.strategy, flex=args.flex) if args.engine_configs else {}
    )
    return DeploymentConfig(
        **values
        | {
            "served_model_name": default_name(args.model)
            if (name := args.served_model_name) is None
            else name,
            "run_dir": run_dir,
            "engine_configs": configs,
            "worker_args": tuple(args.worker_args),
            "frontend_args": tuple(args.frontend_args),
            "autoscale": tuple(args.autoscale),
            "drain_seconds": _or_variable("drain_seconds", args.drain_seconds, os.environ),
            "prefill_dispatch": _or_variable("prefill_dispatch", args.prefill_dispatch, os.environ)
            or DeploymentConfig.prefill_dispatch,
        }
    )


def _or_variable(name: str, given: Any, environ: Mapping[str, str]) -> Any:
    """The value of the flag, else of its variable, as for a worker."""
    variable = SETTINGS[name].variables[0]
    if given is None and environ.get(variable):
        return argument_parser_of(name, variable)(environ[variable])
    return given


def default_name(model: str) -> str:
    """The name of the directory; a Hugging Face name is kept whole."""
    return Path(model).resolve().name if os.path.isdir(model) else model


def engine_configs_in(directory: Path, strategy: str, *, flex: bool = False) -> dict[ProcessRole, Path]:
    """The YAML file of every role that `strategy` needs; with `flex` one for all, of workers that may flip."""
    directory, roles = shipped(directory), spec_of(strategy).roles
    if flex and len(roles) == 1:
        fitting = ", ".join(name for name, spec in STRATEGIES.items() if len(spec.roles) > 1)
        raise ConfigError.bad_value("--flex", True, f"--strategy {fitting}, not {strategy}")
    files: dict[ProcessRole, Path] = {
        role: (directory / f"{'flex' if flex else role}.yaml").absolute() for role in roles
    }
    missing = dict.fromkeys(file.name for file in files.values() if not os.path.isfile(file))
    if missing:
        raise ConfigError.bad_value(
            "--engine-configs", str(directory), f"a directory with {' and '.join(missing)}"
        )
    return files


#: Folders of engine_configs that are no model of TensorRT-LLM's, and one for several models.
_NO_MODELS, _MODELS = ("demo", "modelled"), {"qwen3": r"qwen3-(0\.6|1\.7|4|8|14)b"}
#: What may follow a model's name: its tuning, its precision, its date.
_VARIANT = r"(-(instruct|base|chat|thinking|hf|bf16|fp8|fp4|nvfp4|v?\d+))*"


def engine_configs_for(
    model: str, strategy: str, *, flex: bool = False
) -> tuple[dict[ProcessRole, Path], str]:
    """The shipped files for a model of this name, and what a user should know: their machine, or the limits without."""
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    for folder in sorted(shipped(Path("engine_configs/demo")).parent.glob("*")):
        known = _MODELS.get(folder.name, re.escape(folder.name.removesuffix("-fp8")))
        if folder.name not in _NO_MODELS and re.fullmatch(known + _VARIANT, name):
            files = engine_configs_in(folder, strategy, flex=flex)
            made_for = next(iter(files.values())).read_text().partition(":")[0].removeprefix("# ")
            return files, f"engine configs: {folder}, for {made_for}; --engine-configs DIR takes others"
    default = {name: setting.default for name, setting in SETTINGS.items()}
    return {}, (
        f"no engine config fits {model}: a step has at most {default['max_batch_size']} requests and "
        f"{default['max_num_tokens']} tokens, longer prompts get 400, KV takes {default['free_gpu_memory_fraction']:g} "
        "of the free GPU memory and moves by TensorRT-LLM's default; --engine-configs DIR says otherwise"
    )
