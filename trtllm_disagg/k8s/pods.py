"""The pods of a deployment and what runs in each, checked as far as that is possible on another machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.settings import MOST_SECONDS
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import spec_of
from trtllm_disagg.tools.up.gpus import gpu_needs_of, shutdown_seconds
from trtllm_disagg.tools.up.plan import (
    BEYOND_DRAIN_SECONDS,
    GPU_STARTUP_SECONDS,
    KEY_VARIABLE,
    STARTUP_SECONDS,
    TUNABLE_ENV,
    DeploymentConfig,
    ProcessRole,
    frontend_flags,
    worker_flags,
)

#: The directory in a pod with the files that `up` has in its run directory.
MOUNTED = Path("/etc/trtllm-disagg")
ENGINE_CONFIGS, ADMIN_KEY, TRANSFER_KEY = "engine-configs", "admin-key", "transfer-key"
#: Name of the file in each secret.
KEY = "key"
#: Mount point of the volume with the weights.
MODELS = PurePosixPath("/models")
#: The same value as in Dynamo's operator.
SYSTEM_PORT = 9090

_OVERRIDE = "--override-engine-args"
#: Read by the frontend: an error before the first token has a status, and a stream outlives the worker that began it.
_FRONTEND_ENV = ("DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", "DYN_MIGRATION_LIMIT")
#: Dynamo asks a worker that is silent for 10 s (DYN_CANARY_WAIT_TIME) for a token, which its engine has to make. Until
#: one comes in time, /health and /live say 503, and the worker is out of discovery. Queued prompts are silence too.
_PROBE_ENV = {"DYN_HEALTH_CHECK_ENABLED": "true", "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "30"}
#: As in upstream's recipe for GB200: NCCL takes the way between nodes that a ComputeDomain opens.
_NVLINK_ENV = {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"}
#: Of a worker over several nodes, as in upstream's manifest: its image's user may be root.
_MPIRUN_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
#: Characters that a shell interprets and the operator does not quote.
_NO_WORD = re.compile(r"[\s*?[;&|<>()]")
#: Of the model's files nothing is known here.
_ANY_MODEL = "model"


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of each worker's pod, as Kubernetes quantities; None for no limit."""

    cpu: str | None
    memory: str | None
    shared_memory: str
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Settings of pods that `up` does not have."""

    name: str
    namespace: str | None
    image: str
    dynamo_version: str
    frontends: int
    resources: Resources
    #: Of a volume with the weights.
    model_claim: str | None
    #: Name of the secret with HF_TOKEN.
    hf_token_secret: str | None
    admin_key: bytes | None
    transfer_key: bytes | None
    #: NVLink between the nodes of all workers.
    has_compute_domain: bool
    has_pod_monitor: bool


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with one container. `env` is added to the variables that the operator sets in every pod."""

    role: ProcessRole
    replicas: int
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class WorkerPod(Pod):
    """The pod of a worker. A worker of several nodes has one such pod on each, for each replica."""

    nodes: int
    #: GPUs of each pod.
    gpus: int
    #: Seconds until a start counts as failed.
    startup_seconds: float
    #: Seconds after which a stopping pod is killed.
    stop_seconds: float
    #: Its YAML file.
    engine_config: str | None


def frontend_pod(config: DeploymentConfig, cluster: Cluster) -> Pod:
    env = {name: TUNABLE_ENV[name] for name in _FRONTEND_ENV}
    command = ("python3", "-m", "dynamo.frontend")
    return Pod("frontend", cluster.frontends, command, frontend_flags(config), env)


def worker_pods(config: DeploymentConfig, cluster: Cluster) -> tuple[WorkerPod, ...]:
    """The pod of each role. Raises ConfigError for settings that a worker would refuse, except its model."""
    return tuple(_worker_pod(config, cluster, role) for role in spec_of(config.strategy).roles)


def _worker_pod(config: DeploymentConfig, cluster: Cluster, role: ProcessRole) -> WorkerPod:
    # Imported here because `--help` does not need its libraries.
    from trtllm_disagg.config.engine_args import build_engine_args

    if (config.startup_timeout or 0.0) > MOST_SECONDS:
        raise ConfigError.bad_value(
            "--startup-timeout", config.startup_timeout, "a number of seconds up to 1e9; a probe has an end"
        )
    file = config.engine_configs.get(role)
    in_pod = {role: MOUNTED / ENGINE_CONFIGS / f"{role}.yaml"} if file else {}
    args = worker_flags(replace(config, engine_configs=in_pod), role, _only_in_pods(config, cluster))
    env = dict(_worker_env(cluster))
    given = parse_worker_flags(args, env, is_elsewhere=True)
    if given.extra_engine_args != str(in_pod.get(role, "")):
        # A file of the image may say another number of GPUs.
        none = "no value: --engine-configs has the files of the pods"
        raise ConfigError.bad_value("--worker-args: --extra-engine-args", given.extra_engine_args, none)
    worker = replace(given, extra_engine_args=str(file or ""), model=_ANY_MODEL)
    build_engine_args(worker)
    num_gpus = gpu_needs_of(worker).num_gpus if worker.engine_spec.is_tensorrt_llm else 0
    nodes, gpus = _spread(num_gpus, cluster.resources.gpus_per_node, role)
    if nodes > 1:
        _require_words(args, worker.engine_spec.rank_launcher, role)
        env |= _MPIRUN_ENV
    return WorkerPod(
        role,
        config.workers[role],
        ("python3", "-m", "trtllm_disagg", "worker"),
        args,
        env,
        nodes,
        gpus,
        config.startup_timeout or (GPU_STARTUP_SECONDS if num_gpus else STARTUP_SECONDS),
        worker.drain_seconds + BEYOND_DRAIN_SECONDS + shutdown_seconds(worker),
        file.read_text(encoding="utf-8") if file else None,
    )


def _only_in_pods(config: DeploymentConfig, cluster: Cluster) -> Iterator[str]:
    if config.has_queue:
        # The operator sets NATS_SERVER to the address of its NATS.
        yield from ("--prefill-dispatch", "queue")
    if cluster.transfer_key is not None:
        if any(argument.startswith((_OVERRIDE, "--trtllm.")) for argument in config.worker_args):
            raise ConfigError.bad_value(
                "--worker-args",
                " ".join(config.worker_args),
                f"no {_OVERRIDE} with --transfer-key-file, which needs it; write it into the engine config",
            )
        # Kubernetes replaces it by the pod's address.
        yield from (_OVERRIDE, json.dumps({"embedded": {"transfer_host": "$(POD_IP)"}}))


def _worker_env(cluster: Cluster) -> Iterator[tuple[str, str]]:
    yield "DYN_SYSTEM_PORT", str(SYSTEM_PORT)
    yield from _PROBE_ENV.items()
    if cluster.has_compute_domain:
        yield from _NVLINK_ENV.items()
    if cluster.admin_key is not None:
        yield KEY_VARIABLE, str(MOUNTED / ADMIN_KEY / KEY)
    if cluster.transfer_key is not None:
        yield "TRTLLM_DISAGG_TRANSFER_KEY_FILE", str(MOUNTED / TRANSFER_KEY / KEY)


def _spread(num_gpus: int, gpus_per_node: int, role: ProcessRole) -> tuple[int, int]:
    """(nodes, GPUs of each). Raises ConfigError where nodes would have different numbers of them."""
    if num_gpus <= gpus_per_node:
        return 1, num_gpus
    if num_gpus % gpus_per_node:
        allowed = f"a divisor of {num_gpus}, which each {role} worker has by its engine config"
        raise ConfigError.bad_value("--gpus-per-node", gpus_per_node, allowed)
    return num_gpus // gpus_per_node, gpus_per_node


def _require_words(args: tuple[str, ...], launcher: str, role: ProcessRole) -> None:
    """The operator starts such a worker by a program that takes all arguments as one string."""
    for word in args:
        if _NO_WORD.search(word):
            raise ConfigError(
                f"a {role} worker has several nodes, and {launcher} splits its arguments again, so none may have a "
                f"space or one of *?[;&|<>(): {word!r}; write it into the engine config, or without spaces"
            )
