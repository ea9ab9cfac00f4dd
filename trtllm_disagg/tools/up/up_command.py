"""`trtllm-disagg up`: parses flags to a `DeploymentConfig`, and runs it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from trtllm_disagg.common.cli import parsed
from trtllm_disagg.common.exits import ExitCode, ending_as_on_ctrl_c
from trtllm_disagg.common.interpreter import environment
from trtllm_disagg.common.model_directory import is_complete, servable_model
from trtllm_disagg.config.args import add_flag, argument_parser_of, read_worker_flags
from trtllm_disagg.config.worker_config import SETTINGS, flag_of
from trtllm_disagg.config.yaml_file import shipped
from trtllm_disagg.engine.table import resolve_engine
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, spec_of
from trtllm_disagg.tools.up.gpus import ROLE_VARIABLES
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    GPU_STARTUP_SECONDS,
    STARTUP_SECONDS,
    DeploymentConfig,
    ProcessRole,
)

#: Flags of dynamo.frontend that change its address or how processes reach it.
_FRONTEND_OF_UP = (
    *("--http-host", "--http-port", "--namespace", "--namespace-prefix", "--kserve-grpc-server"),
    *("--tls-cert-path", "--tls-key-path", "--tls-client-ca-cert-path"),
    *("--discovery-backend", "--request-plane", "--event-plane"),
)
_WORKER_ROLES = ("prefill", "decode", "agg")
#: Settings of every worker.
_OF_WORKERS = ("engine", "kv_block_size", "next_router", "prefill_dispatch", "drain_seconds")
_TLS_VARIABLE = "DYN_TLS_CERT_PATH"
_PLAIN = (
    "it reaches the frontend by http at --http-host and --http-port, and by file discovery; put TLS before it"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = DeploymentConfig
    add = parser.add_argument
    add("--strategy", required=True, choices=STRATEGIES, help="which stage gets a request first")
    add("--model", required=True, help="model directory, or name on the Hugging Face hub")
    add("--served-model-name", help="name for clients (default: name of the model directory)")
    unless_given = argparse.SUPPRESS
    for role in _WORKER_ROLES:
        text = f"number of {role} workers (default: {getattr(default, f'{role}_workers')})"
        add(f"--{role}-workers", type=int, metavar="N", default=unless_given, help=text)
    add(
        "--engine-configs",
        type=Path,
        metavar="DIR",
        help="directory with agg.yaml, or prefill.yaml and decode.yaml (default: on TensorRT-LLM by the model's name, "
        "else none)",
    )
    text = "use flex.yaml for both roles, so that workers can flip (default: prefill.yaml and decode.yaml)"
    add("--flex", action="store_true", help=text)
    add(
        "--enable-multimodal",
        dest="images",
        action="store_true",
        help="serve images; the frontend then accepts bodies that are 16 MB larger (default: text only)",
    )
    for name in _OF_WORKERS:
        add_flag(parser, SETTINGS[name])
    text = f"max time of the start (default: {STARTUP_SECONDS:g}; with GPUs {GPU_STARTUP_SECONDS:g})"
    add("--startup-timeout", type=float, metavar="SECONDS", help=text)
    add("--http-host", default=default.http_host, help="frontend's address (default: %(default)s)")
    add(
        "--http-port",
        type=int,
        default=default.http_port,
        metavar="PORT",
        help="frontend's port; 0: any free one (default: %(default)s)",
    )
    add("--namespace", default=default.namespace, help="Dynamo namespace (default: %(default)s)")
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="directory for logs and processes.json (default: a temporary one, kept after a failure)",
    )
    add(
        "--gpus",
        dest="gpu_devices",
        metavar="LIST",
        help="GPUs of the workers, by CUDA's numbers; each worker gets the number that its engine file says "
        f"(default: {', '.join(ROLE_VARIABLES[role] for role in ('prefill', 'decode'))}, or CUDA_VISIBLE_DEVICES, or "
        "all; only --engine tensorrt_llm)",
    )
    text = (
        f"time until a stopping process is killed (default: {BEYOND_DRAIN_SECONDS:g} s after its drain, and "
    )
    text += f"with GPUs {flag_of('engine_health_shutdown_timeout')} more)"
    add("--stop-timeout", type=float, metavar="SECONDS", help=text)
    text = "do not restart dead processes (default: restart them after 1, 2, 4 ... 30 s)"
    add("--no-restart", dest="restart", action="store_false", help=text)
    add_worker_args(parser)
    _add_flags_for(parser, "--frontend-args", "dynamo.frontend", _check_frontend)
    _add_flags_for(parser, "--autoscale", "`trtllm-disagg autoscale`, and run it", _check_autoscale)


def add_worker_args(parser: argparse.ArgumentParser) -> None:
    _add_flags_for(parser, "--worker-args", "every worker", read_worker_flags)


def _check_frontend(words: list[str]) -> None:
    """Refuses flags, also abbreviated, that change how `up` reaches its frontend."""
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    if own := [name for name in names if any(flag.startswith(name) for flag in _FRONTEND_OF_UP)]:
        raise ConfigError(f"{own[0]} is decided by `up`: {_PLAIN}")


def _check_autoscale(words: list[str]) -> None:
    parsed("autoscale", "--run-dir", "", *words)


def _add_flags_for(
    parser: argparse.ArgumentParser, flag: str, program: str, check: Callable[[list[str]], object] = list
) -> None:
    """Adds a flag that takes another program's flags (`cli.TAKE_FLAGS`). `check` raises ConfigError for wrong ones."""

    def read(text: str) -> list[str]:
        try:
            words = shlex.split(text)
            check(words)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{flag}: {error}") from None
        return words

    text = f"arguments for {program} (a single one: {flag}=--flag)"
    parser.add_argument(flag, type=read, default=[], metavar="'...'", help=text)


def run(args: argparse.Namespace) -> ExitCode:
    from trtllm_disagg.tools.up.run_dir import scratch_directory

    if args.run_dir is not None:
        return _serve(config_from(args, args.run_dir))
    # Until `serve` handles these signals.
    with ending_as_on_ctrl_c(), scratch_directory("trtllm-disagg-") as scratch:
        code = _serve(config_from(args, scratch.path))
        scratch.is_kept = code is ExitCode.FAILED
        return code


def _serve(config: DeploymentConfig) -> ExitCode:
    # Imported after the flags are checked; `--help` does not need them.
    import asyncio

    from trtllm_disagg.config.engine_args import ENGINE_KEYS
    from trtllm_disagg.tools.up.lifecycle import serve
    from trtllm_disagg.tools.up.status import status_for
    from trtllm_disagg.tools.up.workers import check_workers, parsed_workers

    if certificate := os.environ.get(_TLS_VARIABLE):
        raise ConfigError.bad_value(_TLS_VARIABLE, certificate, f"none under `up`: {_PLAIN}")
    name, config = default_name(config.model), replace(config, model=str(servable_model(config.model)))
    status = status_for(sys.stderr)
    environ = environment()
    workers = parsed_workers(config, environ)
    # A file would override the engine's flags.
    flags = ENGINE_KEYS.keys() - {"model"} | {"extra_engine_args"}
    by_flags = any(worker.is_explicit(name) for worker in workers for name in flags)
    if not by_flags and all(resolve_engine(worker.engine) == "tensorrt_llm" for worker in workers):
        chosen, message = engine_configs_for(name, config.strategy, flex=config.flex)
        config = replace(config, engine_configs=chosen)
        status.note(message)
    if config.flex and not config.engine_configs:
        raise ConfigError.bad_value("--flex", True, "--engine-configs DIR beside it, with flex.yaml")
    check_workers(config, environ)
    if not is_complete(Path(config.model)) and any(
        resolve_engine(each.engine) == "embedded" for each in workers
    ):
        raise ConfigError.bad_value("--model", config.model, "a directory with its weights, *.safetensors")
    return asyncio.run(serve(config, status))


def config_from(args: argparse.Namespace, run_dir: Path) -> DeploymentConfig:
    """The configuration: its fields are named after the flags."""
    values = {
        field.name: getattr(args, field.name) for field in fields(DeploymentConfig) if field.name in args
    }
    for name in ("drain_seconds", "prefill_dispatch"):
        variable = SETTINGS[name].variables[0]
        if name not in values and os.environ.get(variable):
            values[name] = argument_parser_of(name, variable)(os.environ[variable])
    for role in _WORKER_ROLES:
        if f"{role}_workers" in values and role not in spec_of(args.strategy).roles:
            fitting = ", ".join(name for name, spec in STRATEGIES.items() if role in spec.roles)
            allowed = f"--strategy {fitting}, not {args.strategy}"
            raise ConfigError.bad_value(f"--{role}-workers", values[f"{role}_workers"], allowed)
    given = args.engine_configs
    configs = engine_configs_in(given, args.strategy, flex=args.flex) if given else {}
    served_as = default_name(args.model) if args.served_model_name is None else args.served_model_name
    return DeploymentConfig(
        **values
        | {
            "served_model_name": served_as,
            "run_dir": run_dir,
            "engine_configs": configs,
            "worker_args": tuple(args.worker_args),
            "frontend_args": tuple(args.frontend_args),
            "autoscale": tuple(args.autoscale),
        }
    )


def default_name(model: str) -> str:
    """The directory's name; a Hugging Face name stays whole."""
    return Path(model).resolve().name if os.path.isdir(model) else model


def engine_configs_in(directory: Path, strategy: str, *, flex: bool = False) -> dict[ProcessRole, Path]:
    """The YAML file of each role of `strategy`; with `flex`, one for all roles, so that workers may flip."""
    directory, roles = shipped(directory), spec_of(strategy).roles
    if flex and len(roles) == 1:
        fitting = ", ".join(name for name, spec in STRATEGIES.items() if len(spec.roles) > 1)
        raise ConfigError.bad_value("--flex", True, f"--strategy {fitting}, not {strategy}")
    files: dict[ProcessRole, Path] = {
        role: (directory / f"{'flex' if flex else role}.yaml").absolute() for role in roles
    }
    missing = dict.fromkeys(file.name for file in files.values() if not os.path.isfile(file))
    if missing:
        allowed = f"a directory with {' and '.join(missing)}"
        raise ConfigError.bad_value("--engine-configs", str(directory), allowed)
    return files


#: Folders of engine_configs that fit no model of TensorRT-LLM, or several.
_NO_MODELS = ("demo", "modelled")
_MODELS = {"qwen3": r"qwen3-(0\.6|1\.7|4|8|14)b", "qwen2.5-vl": r"qwen2\.5-vl-(3|7)b"}
#: Suffixes of a model's name: tuning, precision, date.
_VARIANT = r"(-(instruct|base|chat|thinking|hf|bf16|fp8|fp4|nvfp4|v?\d+))*"


def engine_configs_for(
    model: str, strategy: str, *, flex: bool = False
) -> tuple[dict[ProcessRole, Path], str]:
    """The shipped files for a model of this name, and a note: the machine they are for, or the limits without them."""
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    for folder in sorted(shipped(Path("engine_configs/demo")).parent.glob("*")):
        known = _MODELS.get(folder.name, re.escape(folder.name.removesuffix("-fp8")))
        if folder.name not in _NO_MODELS and re.fullmatch(known + _VARIANT, name):
            files = engine_configs_in(folder, strategy, flex=flex)
            made_for = next(iter(files.values())).read_text().partition(":")[0].removeprefix("# ")
            return files, f"engine files: {folder}, for {made_for}; --engine-configs DIR selects others"
    default = {name: setting.default for name, setting in SETTINGS.items()}
    return {}, (
        f"no engine file fits {model}: a step has at most {default['max_batch_size']} requests and "
        f"{default['max_num_tokens']} tokens, longer prompts get 400, KV takes {default['free_gpu_memory_fraction']:g} "
        "of the free GPU memory and moves by TensorRT-LLM's default; --engine-configs DIR sets others"
    )
