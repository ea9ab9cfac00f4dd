"""Plans a deployment: from a `DeploymentConfig` to the argv and environment of each process. Starts nothing."""

from __future__ import annotations

import math
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from trtllm_disagg.admin.keys import KEY_FILE
from trtllm_disagg.common.interpreter import SAFE_PATH, python
from trtllm_disagg.common.reports import ACTIVITY_VARIABLE
from trtllm_disagg.config.worker_config import SETTINGS, check_value, flag_of
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.strategies import STRATEGIES, run_by_workers, spec_of
from trtllm_disagg.tools.up.brokers import (
    NATS_CONFIG,
    STORE_DIR,
    broker_env,
    nats_server_argv,
    nats_url,
    new_nats_password,
)
from trtllm_disagg.tools.up.gpus import NO_GPUS, VARIABLE, Gpus
from trtllm_disagg.tracing.trace_file import TRACES_DIR
from trtllm_disagg.tracing.tracer import FILE_VARIABLE

ProcessRole = Literal["nats", "frontend", "autoscale", "agg", "prefill", "decode"]
#: Time on a busy machine for the grace period before a drain, and for the shutdown after it.
BEYOND_DRAIN_SECONDS = 15.0
#: A first compilation of kernels takes minutes on a busy machine. Loading hundreds of gigabytes of weights and
#: TensorRT-LLM's warm-up can take most of an hour.
STARTUP_SECONDS, GPU_STARTUP_SECONDS = 300.0, 3600.0
LOOPBACK = "127.0.0.1"
DISCOVERY_DIR = "discovery"
#: Setting -> variable, in all processes.
PLANES = {"discovery_backend": "file", "request_plane": "tcp", "event_plane": "zmq"}

NO_WORKERS: tuple[ProcessRole, ...] = ("nats", "frontend", "autoscale")

# Workers refuse to start without these.
STARTED_FIRST: tuple[ProcessRole, ...] = ("nats",)


def stop_order(strategy: str) -> tuple[tuple[ProcessRole, ...], ...]:
    """Groups of roles that stop one after the other; services that all workers need stop last."""
    return (("autoscale",), *((role,) for role in spec_of(strategy).stop_order), ("frontend",), ("nats",))


# Settings that the user's environment may override.
TUNABLE_ENV: dict[str, str] = {
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
    # A stream that fails before its first token gets an HTTP error status instead of 200.
    "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "500",
    # Another worker continues the stream of a worker that died.
    "DYN_MIGRATION_LIMIT": "3",
    # Clients must not change the load at which the frontend refuses requests (POST /busy_threshold).
    "DYN_DISABLE_FRONTEND_ADMIN_API": "1",
    # Health checks of a loading worker get 503, each of which would be a line in its log.
    "DYN_LOG": "info,tower_http=off",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    # Each frontend would leave a temporary file, for an engine that is not used here.
    "DYN_SKIP_SGLANG_LOG_FORMATTING": "1",
}

BODY_LIMIT = "DYN_HTTP_BODY_LIMIT_MB"
#: MB of one image inside a body, as Dynamo's workers limit it (DYN_MM_MAX_DATA_URL_MB).
DATA_URL_MB = 16

KEY_VARIABLE = SETTINGS["admin_key_file"].variables[0]

# Fixed ports fit only one process, so none may inherit them.
PER_PROCESS_ENV = ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT", "DYN_TCP_RESPONSE_STREAM_PORT")

#: Per role on one machine, since a mistyped number of processes could exhaust it.
MAX_WORKERS = 64


@dataclass(frozen=True)
class Backoff:
    """Seconds before a dead process restarts: `first`, doubled each time up to `most`. The delays start over after
    `steady` seconds of being ready. After `attempts` failed starts in a row, the process is given up.
    """

    first: float = 1.0
    max_delay: float = 30.0
    steady: float = 60.0
    attempts: int = 5


@dataclass(frozen=True)
class DeploymentConfig:
    """A whole deployment on this machine. `http_port` 0: any free port."""

    strategy: str
    model: str
    served_model_name: str
    run_dir: Path
    prefill_workers: int = 1
    decode_workers: int = 1
    agg_workers: int = 1
    http_host: str = LOOPBACK
    http_port: int = 8000
    namespace: str = "dynamo"
    #: Of the workers, after a rollout.
    revision: str = ""
    engine: str | None = None
    engine_configs: Mapping[ProcessRole, Path] = field(default_factory=dict)
    #: Empty: files that fit the model's name, of workers that may flip.
    flex: bool = False
    kv_block_size: int | None = None
    #: --enable-multimodal, of `up` or among the workers' own arguments.
    images: bool = False
    next_router: str | None = None
    prefill_dispatch: str = "direct"
    worker_args: tuple[str, ...] = ()
    #: Thresholds changed by `trtllm-disagg set`, for workers that start later.
    thresholds: Mapping[str, int | float] = field(default_factory=dict)
    frontend_args: tuple[str, ...] = ()
    #: Flags of the `trtllm-disagg autoscale` beside the deployment; none: it does not run.
    autoscale: tuple[str, ...] = ()
    #: --gpus, the GPUs for workers. None: as `gpus_of` finds.
    gpu_devices: str | None = None
    #: `gpu_devices` resolved on this machine, once prepared.
    gpus: Gpus = NO_GPUS
    #: None: STARTUP_SECONDS, or GPU_STARTUP_SECONDS with GPUs.
    startup_timeout: float | None = None
    #: After that, a draining worker's requests migrate. None: the worker's default.
    drain_seconds: float | None = None
    #: The longest drain of any worker, by its own arguments too. None until prepared.
    longest_drain: float | None = None
    #: The longest sequence of any engine. None if unknown or not prepared.
    max_seq_len: int | None = None
    #: None: the drain, BEYOND_DRAIN_SECONDS, and the shutdown time of engines with GPUs.
    stop_timeout: float | None = None
    #: Whether and with which delays `up` restarts dead processes.
    restart: bool = True
    backoff: Backoff = field(default_factory=Backoff)
    worker_command: tuple[str, ...] = python("-m", "trtllm_disagg", "worker")
    frontend_command: tuple[str, ...] = python("-m", "dynamo.frontend")

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError.bad_value("--strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")
        for name in ("next_router", "served_model_name", "prefill_dispatch", "drain_seconds"):
            if (value := getattr(self, name)) is not None:
                check_value(name, value)
        if self.strategy not in run_by_workers():
            self._refuse_calls()
        for role, count in self.workers.items():
            if not 1 <= count <= MAX_WORKERS:
                raise ConfigError.bad_value(f"--{role}-workers", count, f"1 to {MAX_WORKERS} workers")
        if not self.http_host.strip():
            raise ConfigError.bad_value("--http-host", self.http_host, "an address or a name of this machine")
        if not 0 <= self.http_port <= 65535:
            raise ConfigError.bad_value("--http-port", self.http_port, "0 (any free port) to 65535")
        if self.startup_timeout is not None and not self.startup_timeout > 0:
            raise ConfigError.bad_value("--startup-timeout", self.startup_timeout, "more than 0 seconds")
        if not self.stop_seconds >= 0:
            raise ConfigError.bad_value("--stop-timeout", self.stop_timeout, "0 seconds or more")

    @property
    def startup_seconds(self) -> float:
        if self.startup_timeout is not None:
            return self.startup_timeout
        return GPU_STARTUP_SECONDS if self.gpus.needs else STARTUP_SECONDS

    @property
    def stop_seconds(self) -> float:
        """Seconds until a stopping process is killed."""
        if self.stop_timeout is not None:
            return self.stop_timeout
        shutdown = max((need.shutdown_seconds for need in self.gpus.needs.values()), default=0.0)
        return self._drain_seconds + BEYOND_DRAIN_SECONDS + shutdown

    @property
    def beyond_drain_seconds(self) -> float:
        """The part of `stop_seconds` after the drain; negative if there is none."""
        return self.stop_seconds - self._drain_seconds

    @property
    def _drain_seconds(self) -> float:
        for seconds in (self.longest_drain, self.drain_seconds):
            if seconds is not None:
                return seconds
        return float(SETTINGS["drain_seconds"].default)

    @property
    def base_url(self) -> str:
        host = f"[{self.client_host}]" if ":" in self.client_host else self.client_host
        return f"http://{host}:{self.http_port}"

    @property
    def client_host(self) -> str:
        """Host at which clients on this machine reach the frontend."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.http_host, self.http_host)

    @property
    def has_queue(self) -> bool:
        return self.prefill_dispatch == "queue"

    @property
    def ready_line(self) -> str:
        return f"ready {self.base_url} model={self.served_model_name} strategy={self.strategy}"

    @property
    def workers(self) -> dict[ProcessRole, int]:
        """Number of workers per role, also for roles outside the strategy."""
        return {"prefill": self.prefill_workers, "decode": self.decode_workers, "agg": self.agg_workers}

    def _refuse_calls(self) -> None:
        """Refuses settings of calls between workers under a strategy without such calls."""
        calling = f"--strategy {' or '.join(run_by_workers())}, not {self.strategy}"
        if self.next_router is not None:
            allowed = f"{calling}, where no worker calls another"
            raise ConfigError.bad_value("--next-router", self.next_router, allowed)
        if self.has_queue:
            raise ConfigError.bad_value("--prefill-dispatch", self.prefill_dispatch, f"direct, or {calling}")


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start; `env` extends `up`'s environment. A flipped worker keeps its name, engine file and GPUs."""

    name: str
    role: ProcessRole
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    system_port: int | None = None
    http_port: int | None = None
    nats_port: int | None = None
    #: None: not a worker.
    revision: str | None = None

    @property
    def first_role(self) -> ProcessRole:
        """The role that its engine and GPUs are for."""
        return cast(ProcessRole, self.name.rpartition("-")[0] or self.name)

    @property
    def ports(self) -> dict[str, int]:
        named = {"http": self.http_port, "nats": self.nats_port, "system": self.system_port}
        return {name: port for name, port in named.items() if port is not None}


def plan(
    config: DeploymentConfig, *, system_ports: Iterable[int], environ: Mapping[str, str]
) -> tuple[ProcessSpec, ...]:
    """All processes in the order of their start. Uses `num_system_ports` of `system_ports`."""
    env, ports = shared_env(config, environ), iter(system_ports)
    services = [_nats(config, next(ports), next(ports))] if config.has_queue else []
    specs = [*services, _frontend(config, env)]
    for role in spec_of(config.strategy).roles:
        for index in range(config.workers[role]):
            devices = config.gpus.environment(role, devices_of(specs))
            specs.append(worker_spec(config, role, index, env | queue_env(services) | devices, next(ports)))
    return tuple(specs)


def devices_of(specs: Iterable[ProcessSpec]) -> Iterator[tuple[ProcessRole, Mapping[str, str]]]:
    """Role and environment of each process, for `Gpus.environment`."""
    return ((spec.first_role, spec.env) for spec in specs)


def worker_arguments(config: DeploymentConfig) -> dict[str, tuple[str, ...]]:
    """Role -> arguments of its workers."""
    command = len(config.worker_command)
    return {
        role: worker_spec(config, role, 0, {}, 0).argv[command:] for role in spec_of(config.strategy).roles
    }


def num_system_ports(config: DeploymentConfig) -> int:
    """One per worker, and two for NATS."""
    return worker_total(config) + (2 if config.has_queue else 0)


def worker_total(config: DeploymentConfig) -> int:
    return sum(config.workers[role] for role in spec_of(config.strategy).roles)


def shared_env(config: DeploymentConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of all processes: discovery and planes, on loopback where Dynamo allows it. Without a broker, ZMQ
    publishers bind all interfaces; `DYN_EVENT_PLANE_HOST` sets only the advertised address.
    """
    longest = config.max_seq_len
    tunable = TUNABLE_ENV | ({BODY_LIMIT: body_limit(longest, images=config.images)} if longest else {})
    names = ("namespace", "prefill_dispatch")
    where = PLANES | {name: getattr(config, name) for name in names} | {"worker_revision": config.revision}
    return {
        **SAFE_PATH,
        "HOME": _writable_home(environ.get("HOME"), config.run_dir),
        # All names of a variable: a worker reads the first, and the user's environment may have any.
        **{variable: value for name, value in where.items() for variable in SETTINGS[name].variables},
        "DYN_FILE_KV": str(config.run_dir / DISCOVERY_DIR),
        # Otherwise torch leaves this folder in TMPDIR when transformers imports its compiler.
        "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR", str(config.run_dir / "torch")),
        "DYN_SYSTEM_HOST": LOOPBACK,
        "DYN_TCP_RPC_HOST": LOOPBACK,
        "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
        "DYN_EVENT_PLANE_HOST": LOOPBACK,
        **broker_env(config.run_dir),
        **{name: environ.get(name, default) for name, default in tunable.items()},
    }


def body_limit(max_seq_len: int, *, images: bool = False) -> str:
    """In MB. The frontend tokenises a body before it checks its length, with 125 bytes of memory per byte. A token of
    text takes at most 32 bytes, even escaped. The minimum leaves room for schemas and several prompts. `images`: plus
    one image as a data URL.
    """
    return str(max(2, math.ceil(max_seq_len / 2**15)) + DATA_URL_MB * images)


def _writable_home(given: str | None, otherwise: Path) -> str:
    """Where Dynamo's frontend writes models' files. A service has no HOME, and a container's user may have root's."""
    homes = [given]
    with suppress(KeyError):
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    return next((home for home in homes if home and os.access(home, os.W_OK)), str(otherwise))


def _frontend(config: DeploymentConfig, env: Mapping[str, str]) -> ProcessSpec:
    argv = (
        *config.frontend_command,
        *("--http-host", config.http_host),
        *("--http-port", str(config.http_port)),
        *("--discovery-backend", "file"),
        *("--router-mode", "kv"),
        *("--request-plane", "tcp"),
        *("--event-plane", "zmq"),
        # All revisions, where DYN_NAMESPACE would mean one.
        *("--namespace-prefix", config.namespace),
        *_flag("--kv-cache-block-size", config.kv_block_size),
        *config.frontend_args,
    )
    # No system port: the frontend's health is on its HTTP port.
    return ProcessSpec("frontend", "frontend", argv, env, http_port=config.http_port)


def autoscale_spec(config: DeploymentConfig) -> ProcessSpec:
    """A client of the command socket, so it starts once commands are served."""
    argv = python("-m", "trtllm_disagg", "autoscale", "--run-dir", str(config.run_dir), *config.autoscale)
    return ProcessSpec("autoscale", "autoscale", argv)


def _nats(config: DeploymentConfig, port: int, health_port: int) -> ProcessSpec:
    argv = (*nats_server_argv(LOOPBACK, port, health_port, config.run_dir / STORE_DIR), *NATS_CONFIG)
    return ProcessSpec("nats", "nats", argv, new_nats_password(), system_port=health_port, nats_port=port)


def queue_env(services: Iterable[ProcessSpec]) -> dict[str, str]:
    """The prefill queue's address for workers; empty without a queue. Not a flag, because it holds the password and all
    users can read command lines.
    """
    urls = [nats_url(LOOPBACK, each.nats_port, each.env) for each in services if each.nats_port is not None]
    return {variable: url for url in urls for variable in SETTINGS["nats_server"].variables}


def worker_spec(
    config: DeploymentConfig,
    role: ProcessRole,
    index: int,
    env: Mapping[str, str],
    system_port: int,
    first_role: ProcessRole | None = None,
) -> ProcessSpec:
    """One worker. `env`: `shared_env`, queue and GPUs. `first_role`: of a flipped worker."""
    first_role = first_role or role
    name = f"{first_role}-{index}"
    argv = (
        *config.worker_command,
        *("--namespace", config.namespace),
        *("--model", config.model),
        *("--served-model-name", config.served_model_name),
        *("--disaggregation-mode", role),
        *(() if role == "agg" else ("--disaggregation-strategy", config.strategy)),
        # Also for a second stage: after a switch, the frontend needs its cache.
        *("--publish-kv-events", "--publish-metrics"),
        *_flag("--engine", config.engine),
        *_flag("--extra-engine-args", config.engine_configs.get(first_role)),
        *_flag("--kv-block-size", config.kv_block_size),
        *_flag("--next-router", config.next_router),
        *(("--enable-multimodal",) if config.images else ()),
        *_flag(flag_of("drain_seconds"), config.drain_seconds),
        *config.worker_args,
        *(text for name, value in config.thresholds.items() for text in (flag_of(name), str(value))),
    )
    return ProcessSpec(
        name=name,
        role=role,
        argv=argv,
        env={
            **env,
            KEY_VARIABLE: str(config.run_dir / KEY_FILE),
            "DYN_SYSTEM_PORT": str(system_port),
            ACTIVITY_VARIABLE: str(config.run_dir / f"{name}.activity"),
            FILE_VARIABLE: str(config.run_dir / TRACES_DIR / f"{name}.jsonl"),
        },
        system_port=system_port,
        revision=config.revision,
    )


def same_again(
    spec: ProcessSpec, config: DeploymentConfig, environ: Mapping[str, str], others: Iterable[ProcessSpec]
) -> ProcessSpec:
    """Replaces a dead process: same name, role and port, with current settings."""
    env = shared_env(config, environ)
    if spec.role == "frontend":
        return _frontend(config, env)
    if spec.system_port is None or spec.role == "nats":
        return spec
    if VARIABLE in spec.env:
        env[VARIABLE] = spec.env[VARIABLE]
    index = int(spec.name.rpartition("-")[2])
    return worker_spec(config, spec.role, index, env | queue_env(others), spec.system_port, spec.first_role)


def _flag(name: str, value: object | None) -> tuple[str, ...]:
    return () if value is None else (name, str(value))


class PortInUseError(ConfigError):
    """Another process listens at the frontend's port."""


class RunDirInUseError(ConfigError):
    """A living deployment uses the run directory."""


class DeploymentFailedError(DisaggError):
    """The deployment failed to start or to continue. The message is a report for users."""
