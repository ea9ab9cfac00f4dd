"""Plans a deployment: from a `DeploymentConfig` to the argv and environment of every process. Starts none."""

from __future__ import annotations

import math
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from trtllm_disagg.admin.keys import KEY_FILE
from trtllm_disagg.config.worker_config import SETTINGS, check_value, flag_of
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.processes.interpreter import SAFE_PATH, python
from trtllm_disagg.processes.reports import ACTIVITY_VARIABLE
from trtllm_disagg.strategies import STRATEGIES, spec_of, worker_side
from trtllm_disagg.tools.up.brokers import (
    STORE_DIR,
    broker_env,
    nats_config_argv,
    nats_server_argv,
    nats_url,
    new_nats_password,
)
from trtllm_disagg.tools.up.gpus import NO_GPUS, VARIABLE, Gpus
from trtllm_disagg.tracing.trace_file import TRACES_DIR
from trtllm_disagg.tracing.tracer import FILE_VARIABLE

ProcessRole = Literal["nats", "frontend", "agg", "prefill", "decode"]
#: Time for the grace period before a worker drains, and for its shutdown after that, on a busy machine.
BEYOND_DRAIN_SECONDS = 15.0
#: Compiling kernels for the first time on a busy machine takes minutes. Loading hundreds of gigabytes of weights and
#: TensorRT-LLM's warm-up may take most of an hour.
STARTUP_SECONDS, GPU_STARTUP_SECONDS = 300.0, 3600.0
LOOPBACK = "127.0.0.1"
DISCOVERY_DIR = "discovery"
#: By setting; those of all processes.
PLANES = {"discovery_backend": "file", "request_plane": "tcp", "event_plane": "zmq"}

NO_WORKERS: tuple[ProcessRole, ...] = ("nats", "frontend")

# Workers refuse to start without these.
STARTED_FIRST: tuple[ProcessRole, ...] = ("nats",)


def stop_order(strategy: str) -> tuple[tuple[ProcessRole, ...], ...]:
    """Groups of roles that stop one after the other. Services that all workers need stop last."""
    return (*((role,) for role in spec_of(strategy).stop_order), ("frontend",), ("nats",))


# Settings that the user's environment may override.
TUNABLE_ENV: dict[str, str] = {
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
    # A stream that fails before its first token gets an HTTP status, in every strategy, instead of a 200.
    "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": "500",
    # A stream survives the death of its worker, if another worker can continue it.
    "DYN_MIGRATION_LIMIT": "3",
    # No client may change from which load on the frontend refuses requests (POST /busy_threshold).
    "DYN_DISABLE_FRONTEND_ADMIN_API": "1",
    # Each health check of a loading worker gets 503, which would be a line in its log.
    "DYN_LOG": "info,tower_http=off",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    # Otherwise each start of a frontend makes a temporary file, for an engine that is not used here.
    "DYN_SKIP_SGLANG_LOG_FORMATTING": "1",
}

BODY_LIMIT = "DYN_HTTP_BODY_LIMIT_MB"

KEY_VARIABLE = SETTINGS["admin_key_file"].variables[0]

# Fixed ports, which only one process can use, so they must not be inherited from the user's environment.
PER_PROCESS_ENV = ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT", "DYN_TCP_RESPONSE_STREAM_PORT")

#: Of one role on one machine. Each worker is a process, so a mistyped number could exhaust the machine.
MOST_WORKERS = 64


@dataclass(frozen=True)
class Backoff:
    """The delays before a dead process is started again, in seconds: `first`, twice that, and so on up to `most`.

    After `steady` seconds of being ready the delays begin anew. After `attempts` failed starts in a row it is given up.
    """

    first: float = 1.0
    most: float = 30.0
    steady: float = 60.0
    attempts: int = 5


@dataclass(frozen=True)
class DeploymentConfig:
    """A whole deployment on this machine. `http_port` 0 means: any free port."""

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
    #: Of its workers, after a rollout.
    revision: str = ""
    engine: str | None = None
    engine_configs: Mapping[ProcessRole, Path] = field(default_factory=dict)
    #: Without them, those that fit the model's name are of workers that may flip.
    flex: bool = False
    kv_block_size: int | None = None
    next_router: str | None = None
    prefill_dispatch: str = "direct"
    worker_args: tuple[str, ...] = ()
    #: Setting -> value, set while it runs (`trtllm-disagg set`), for workers that start later.
    thresholds: Mapping[str, int | float] = field(default_factory=dict)
    frontend_args: tuple[str, ...] = ()
    #: The flags of `trtllm-disagg autoscale`, which runs beside the deployment; none: it does not.
    autoscale: tuple[str, ...] = ()
    #: The value of `--gpus`, the GPUs that workers may use. None: those that `gpus_of` finds.
    gpu_devices: str | None = None
    #: `gpu_devices` resolved on this machine, when the deployment is prepared.
    gpus: Gpus = NO_GPUS
    #: None: STARTUP_SECONDS, or with GPUs GPU_STARTUP_SECONDS.
    startup_timeout: float | None = None
    #: A draining worker then gives up its requests, which migrate to other workers. None: the worker's default.
    drain_seconds: float | None = None
    #: The most that a worker has, by its own arguments too. None until the deployment is prepared.
    longest_drain: float | None = None
    #: The longest sequence of its engines. None where unknown, and until the deployment is prepared.
    max_seq_len: int | None = None
    #: None: after the workers have drained, BEYOND_DRAIN_SECONDS and the time of an engine with GPUs to shut down.
    stop_timeout: float | None = None
    #: Whether `up` starts dead processes again, and with which delays.
    restart: bool = True
    backoff: Backoff = field(default_factory=Backoff)
    worker_command: tuple[str, ...] = python("-m", "trtllm_disagg", "worker")
    frontend_command: tuple[str, ...] = python("-m", "dynamo.frontend")

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError.bad_value("--strategy", self.strategy, f"one of {', '.join(STRATEGIES)}")
        if self.next_router is not None:
            check_value("next_router", self.next_router)
        check_value("served_model_name", self.served_model_name)
        check_value("prefill_dispatch", self.prefill_dispatch)
        if self.strategy not in worker_side():
            self._refuse_calls()
        for role, count in self.workers.items():
            if not 1 <= count <= MOST_WORKERS:
                raise ConfigError.bad_value(f"--{role}-workers", count, f"1 to {MOST_WORKERS} workers")
        if not self.http_host.strip():
            raise ConfigError.bad_value("--http-host", self.http_host, "an address or a name of this machine")
        if not 0 <= self.http_port <= 65535:
            raise ConfigError.bad_value("--http-port", self.http_port, "0 (any free port) to 65535")
        if self.startup_timeout is not None and not self.startup_timeout > 0:
            raise ConfigError.bad_value("--startup-timeout", self.startup_timeout, "more than 0 seconds")
        if self.drain_seconds is not None:
            check_value("drain_seconds", self.drain_seconds)
        if not self.stop_seconds >= 0:
            raise ConfigError.bad_value("--stop-timeout", self.stop_timeout, "0 seconds or more")

    @property
    def startup_seconds(self) -> float:
        if self.startup_timeout is not None:
            return self.startup_timeout
        return GPU_STARTUP_SECONDS if self.gpus.needs else STARTUP_SECONDS

    @property
    def stop_seconds(self) -> float:
        """Seconds after which a stopping process is killed."""
        if self.stop_timeout is not None:
            return self.stop_timeout
        shutdown = max((need.shutdown_seconds for need in self.gpus.needs.values()), default=0.0)
        return self._drain_seconds + BEYOND_DRAIN_SECONDS + shutdown

    @property
    def beyond_drain_seconds(self) -> float:
        """The part of `stop_seconds` in which a worker without requests ends; negative when there is none."""
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
        """The host at which a client on this machine reaches the frontend."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.http_host, self.http_host)

    @property
    def has_queue(self) -> bool:
        return self.prefill_dispatch == "queue"

    @property
    def ready_line(self) -> str:
        return f"ready {self.base_url} model={self.served_model_name} strategy={self.strategy}"

    @property
    def workers(self) -> dict[ProcessRole, int]:
        """The number of workers of each role, also of roles that the strategy does not have."""
        return {"prefill": self.prefill_workers, "decode": self.decode_workers, "agg": self.agg_workers}

    def _refuse_calls(self) -> None:
        """Refuse settings of calls between workers under a strategy without such calls."""
        calling = f"--strategy {' or '.join(worker_side())}, not {self.strategy}"
        if self.next_router is not None:
            allowed = f"{calling}, where no worker calls another"
            raise ConfigError.bad_value("--next-router", self.next_router, allowed)
        if self.has_queue:
            raise ConfigError.bad_value("--prefill-dispatch", self.prefill_dispatch, f"direct, or {calling}")


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is added to the environment of `up`. A worker that was flipped keeps its name, its
    engine's file and its GPUs.
    """

    name: str
    role: ProcessRole
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    system_port: int | None = None
    http_port: int | None = None
    nats_port: int | None = None
    #: None for what is no worker.
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
    """All processes, in the order in which they start. Uses `num_system_ports` of `system_ports`."""
    env, ports = shared_env(config, environ), iter(system_ports)
    services = [_nats(config, next(ports), next(ports))] if config.has_queue else []
    specs = [*services, _frontend(config, env)]
    for role in spec_of(config.strategy).roles:
        for index in range(config.workers[role]):
            devices = config.gpus.environment(role, devices_of(specs))
            specs.append(worker_spec(config, role, index, env | queue_env(services) | devices, next(ports)))
    return tuple(specs)


def devices_of(specs: Iterable[ProcessSpec]) -> Iterator[tuple[ProcessRole, Mapping[str, str]]]:
    """The role and environment of each process, for `Gpus.environment`."""
    return ((spec.first_role, spec.env) for spec in specs)


def worker_arguments(config: DeploymentConfig) -> dict[str, tuple[str, ...]]:
    """ProcessRole -> what its workers are started with."""
    command = len(config.worker_command)
    return {
        role: worker_spec(config, role, 0, {}, 0).argv[command:] for role in spec_of(config.strategy).roles
    }


def num_system_ports(config: DeploymentConfig) -> int:
    """One for each worker, and two for NATS."""
    return worker_total(config) + (2 if config.has_queue else 0)


def worker_total(config: DeploymentConfig) -> int:
    return sum(config.workers[role] for role in spec_of(config.strategy).roles)


def shared_env(config: DeploymentConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Discovery and planes: equal in all processes, and on loopback as far as Dynamo allows. Without a broker, ZMQ
    publishers bind every interface; `DYN_EVENT_PLANE_HOST` sets only the address that they advertise.
    """
    tunable = dict(TUNABLE_ENV) | ({BODY_LIMIT: body_limit(config.max_seq_len)} if config.max_seq_len else {})
    names = ("namespace", "prefill_dispatch")
    where = PLANES | {name: getattr(config, name) for name in names} | {"worker_revision": config.revision}
    return {
        **SAFE_PATH,
        "HOME": environ.get("HOME") or _home_of_user(config.run_dir),
        # By all their variables: of several a worker reads the first, and the user's environment may have any of them.
        **{variable: value for name, value in where.items() for variable in SETTINGS[name].variables},
        "DYN_FILE_KV": str(config.run_dir / DISCOVERY_DIR),
        # torch makes this folder when transformers imports its compiler; in TMPDIR it would stay behind.
        "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR", str(config.run_dir / "torch")),
        "DYN_SYSTEM_HOST": LOOPBACK,
        "DYN_TCP_RPC_HOST": LOOPBACK,
        "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
        "DYN_EVENT_PLANE_HOST": LOOPBACK,
        **broker_env(config.run_dir),
        **{name: environ.get(name, default) for name, default in (tunable | _of_model(config)).items()},
    }


def _of_model(config: DeploymentConfig) -> dict[str, str]:
    """The variables in worker.env beside the engine configs; the user's environment may override them."""
    files = {path.with_name("worker.env") for path in config.engine_configs.values()}
    lines = [line for path in files if path.is_file() for line in path.read_text().splitlines()]
    return {
        name: value
        for name, is_set, value in (line.partition("=") for line in lines)
        if is_set and name[0] != "#"
    }


def body_limit(max_seq_len: int) -> str:
    """In MB. The frontend tokenises a body before it looks at its length, and needs 125 bytes for each of it. A token
    of text, escapes included, takes less than 32 of them. The least is for schemas and several prompts.
    """
    return str(max(2, math.ceil(max_seq_len / 2**15)))


def _home_of_user(otherwise: Path) -> str:
    """Of an environment without HOME, such as a system service's: Dynamo's frontend finds no model without it."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user without an entry, as in some containers
        return str(otherwise)
    return home if os.access(home, os.W_OK) else str(otherwise)


def _frontend(config: DeploymentConfig, env: Mapping[str, str]) -> ProcessSpec:
    argv = (
        *config.frontend_command,
        *("--http-host", config.http_host),
        *("--http-port", str(config.http_port)),
        *("--discovery-backend", "file"),
        *("--router-mode", "kv"),
        *("--request-plane", "tcp"),
        *("--event-plane", "zmq"),
        # All revisions; DYN_NAMESPACE alone would mean one.
        *("--namespace-prefix", config.namespace),
        *_flag("--kv-cache-block-size", config.kv_block_size),
        *config.frontend_args,
    )
    # No system port: the frontend opens no system server, its health is on the HTTP port.
    return ProcessSpec("frontend", "frontend", argv, env, http_port=config.http_port)


def _nats(config: DeploymentConfig, port: int, health_port: int) -> ProcessSpec:
    argv = (*nats_server_argv(LOOPBACK, port, health_port, config.run_dir / STORE_DIR), *nats_config_argv())
    return ProcessSpec("nats", "nats", argv, new_nats_password(), system_port=health_port, nats_port=port)


def queue_env(services: Iterable[ProcessSpec]) -> dict[str, str]:
    """Where a worker finds the prefill queue; empty without a queue. No flag: every user of the host can read command
    lines, and the address has the password.
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
    """One worker; `env` is `shared_env`, and the worker's queue and GPUs. `first_role`: of one that was flipped."""
    first_role = first_role or role
    name = f"{first_role}-{index}"
    argv = (
        *config.worker_command,
        *("--namespace", config.namespace),
        *("--model", config.model),
        *("--served-model-name", config.served_model_name),
        *("--disaggregation-mode", role),
        *(() if role == "agg" else ("--disaggregation-strategy", config.strategy)),
        # Also for a second stage: after a switch it is the first one, and the frontend then knows its cache.
        *("--publish-kv-events", "--publish-metrics"),
        *_flag("--engine", config.engine),
        *_flag("--extra-engine-args", config.engine_configs.get(first_role)),
        *_flag("--kv-block-size", config.kv_block_size),
        *_flag("--next-router", config.next_router),
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
    """The replacement of a dead process: with its name, role and port, and the current settings."""
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
    """Another process listens at the port of the frontend."""


class RunDirInUseError(ConfigError):
    """The run directory belongs to a deployment that is still alive."""


class DeploymentFailedError(DisaggError):
    """The deployment did not become ready, or cannot continue. The message is a report for users."""
