"""What is checked of a deployment's workers before any of them starts. Each would refuse the same after seconds, and
the frontend would try for ever to serve a model that it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engine.engines import resolve_engine
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes import machine
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.gpus import gpus_of, longest_sequence, worker_configs
from trtllm_disagg.tools.up.plan import DeploymentConfig, shared_env, worker_arguments, worker_total


def parsed_workers(config: DeploymentConfig, environ: Mapping[str, str]) -> list[WorkerConfig]:
    """The configuration of a worker of each role. Raises ConfigError for wrong flags and variables."""
    environ = {**environ, **shared_env(config, environ)}
    workers = [parse_worker_flags(arguments, environ) for arguments in worker_arguments(config).values()]
    if any(worker.served_model_name != config.served_model_name for worker in workers):
        raise ConfigError("--worker-args: --served-model-name is a flag of `up` itself")
    return workers


def check_workers(config: DeploymentConfig, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for flags, engine arguments and a model that no worker could serve."""
    from trtllm_disagg.config.engine_args import build_engine_args

    for worker in parsed_workers(config, environ):
        build_engine_args(replace(worker, engine=resolve_engine(worker.engine)))
        if "chat" in worker.endpoint_types and worker.custom_jinja_template is None:
            _require_chat_template(Path(config.model))


def _require_chat_template(model: Path) -> None:
    """Without one, Dynamo's frontend would try for ever to serve chats; models of DeepSeek have theirs in its code."""
    file = model / "tokenizer_config.json"
    texts = [each.read_text(encoding="utf-8") for each in (model / "config.json", file) if each.is_file()]
    has_one = any((model / f"chat_template.{suffix}").exists() for suffix in ("jinja", "json"))
    if (
        texts
        and not has_one
        and not any(f'"{word}' in text for text in texts for word in ("chat_template", "deepseek"))
    ):
        instead = "--worker-args '--custom-jinja-template FILE', or '--endpoint-types completions'"
        raise ConfigError(
            f"--model: {file} has no chat_template, which chats need; add it, or give {instead}"
        )


def with_workers(config: DeploymentConfig, environ: Mapping[str, str]) -> DeploymentConfig:
    """With what follows from its workers' arguments. Raises ConfigError for wrong ones."""
    workers = worker_arguments(config)
    # As the workers have it, by --worker-args too.
    configs = [worker for _, worker in worker_configs(workers, environ)]
    for worker in configs:
        worker.engine_spec.require_installed()
    return replace(
        config,
        max_seq_len=longest_sequence(configs),
        longest_drain=max((worker.drain_seconds for worker in configs), default=None),
        gpus=gpus_of(workers, config.gpu_devices, environ),
    )


def needs_of(config: DeploymentConfig) -> machine.Needs:
    spec = spec_of(config.strategy)
    workers = worker_total(config) if spec.is_disaggregated else 0
    routers = sum(config.workers[role] for role in spec.kv_routed_roles) if config.next_router == "kv" else 0
    inotify = machine.INOTIFY_PER_WORKER * workers + machine.INOTIFY_PER_KV_ROUTER * routers
    return machine.Needs(machine.INOTIFY_PER_FRONTEND + inotify, moves_kv=spec.is_disaggregated)
