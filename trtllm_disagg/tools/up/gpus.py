"""Chooses the GPUs of each worker of a deployment: its CUDA_VISIBLE_DEVICES.

Prefill workers take theirs from the front of the list and decode workers from its end, so that either role can be
scaled without a device in common. A GPU is shared only where the workers' shares of its memory add up to at most 1.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from trtllm_disagg.config.args import parse_worker_flags
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engine.engines import ENGINES, resolve_engine
from trtllm_disagg.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
#: Dynamo's launch scripts use the same names.
ROLE_VARIABLES: Mapping[str, str] = {
    "agg": "AGG_CUDA_VISIBLE_DEVICES",
    "prefill": "PREFILL_CUDA_VISIBLE_DEVICES",
    "decode": "DECODE_CUDA_VISIBLE_DEVICES",
}
#: Engine arguments that multiply to the number of a worker's GPUs.
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
#: TensorRT-LLM's default of kv_cache_config.free_gpu_memory_fraction.
_FRACTION = 0.9
_DRIVER = Path("/proc/driver/nvidia/gpus")
#: Without its daemon the driver loads for each call, which takes seconds with many GPUs.
_SMI_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """The needs of one worker."""

    num_gpus: int
    #: Share of each GPU's memory, for KV.
    fraction: float
    #: How long its engine may take to shut down.
    shutdown_seconds: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """The devices and the needs of each role. A role that is not in `needs` gets no devices."""

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: Mapping[str, GpuNeeds] = field(default_factory=dict)

    def environment(self, role: str, taken: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
        """The variables of one more worker; `taken`: roles and environments of the others. Raises ConfigError when no
        GPU has room.
        """
        if role not in self.needs:
            return {}
        need, used = self.needs[role], self._used(taken)
        groups = self._groups(role, need.num_gpus)
        group = min(groups, key=lambda devices: max(used[device] for device in devices))
        fullest = max(used[device] for device in group)
        if fullest + need.fraction > 1 + 1e-9:
            raise ConfigError.bad_value(
                "--gpus",
                ",".join(self.devices[role]),
                f"{need.num_gpus} more for one more {role} worker, fewer workers, or smaller "
                f"kv_cache_config.free_gpu_memory_fraction: {need.fraction:g} of GPU {','.join(group)} is needed where "
                f"other workers have {fullest:g}",
            )
        return {VARIABLE: ",".join(group)}

    def _used(self, taken: Iterable[tuple[str, Mapping[str, str]]]) -> Mapping[str, float]:
        """Device -> the share of its memory that workers use."""
        used: defaultdict[str, float] = defaultdict(float)
        for role, environment in taken:
            for device in environment.get(VARIABLE, "").split(",") if role in self.needs else ():
                used[device] += self.needs[role].fraction
        return used

    def _groups(self, role: str, size: int) -> list[tuple[str, ...]]:
        """Groups of neighbouring devices for one worker, in order of preference."""
        devices = self.devices[role]
        if size > len(devices):
            raise ConfigError.bad_value(
                "--gpus",
                ",".join(devices),
                f"at least {size}: each {role} worker has {' x '.join(PARALLEL_SIZES)} of them",
            )
        last = len(devices) - size
        starts = range(last, -1, -size) if role == "decode" else range(0, last + 1, size)
        return [devices[start : start + size] for start in starts]


NO_GPUS = Gpus()


def gpus_of(
    workers: Mapping[str, Sequence[str]],
    given: str | None,
    environ: Mapping[str, str],
    present: Callable[[], Mapping[str, str]] | None = None,
) -> Gpus:
    """The GPUs for `workers` (role -> arguments of a worker): those of `given` (--gpus), else of each role's variable,
    else of CUDA_VISIBLE_DEVICES, which may be empty, else all of the machine (`present`: see `present_gpus`).

    NO_GPUS when no engine runs on GPUs, or no GPU is found: then the engine reports that. Raises ConfigError.
    """
    on_gpus = {
        role: config
        for role, config in worker_configs(workers, environ)
        if ENGINES[config.engine].is_tensorrt_llm
    }
    if not on_gpus:
        if given:
            raise ConfigError.bad_value("--gpus", given, "an engine that gets GPUs: --engine tensorrt_llm")
        return NO_GPUS
    machine = (present or present_gpus)()
    if given is not None:
        devices = dict.fromkeys(on_gpus, parse_gpus("--gpus", given, machine))
    else:
        devices = _devices_in(environ, on_gpus, machine)
    return Gpus(devices, {role: gpu_needs_of(config) for role, config in on_gpus.items() if devices[role]})


def _devices_in(
    environ: Mapping[str, str], roles: Iterable[str], machine: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    devices = {}
    for role in roles:
        key = next((name for name in (ROLE_VARIABLES[role], VARIABLE) if environ.get(name)), VARIABLE)
        given = environ.get(key)
        devices[role] = tuple(machine) if given is None else parse_gpus(key, given, machine) if given else ()
    return devices


def worker_configs(
    workers: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> Iterator[tuple[str, WorkerConfig]]:
    """With `auto` resolved to an engine. Skips workers with wrong arguments: the worker itself refuses those."""
    for role, arguments in workers.items():
        with suppress(ConfigError):
            config = parse_worker_flags(arguments, environ, ignores_unknown=True, is_elsewhere=True)
            yield role, replace(config, engine=resolve_engine(config.engine))


def gpu_needs_of(config: WorkerConfig) -> GpuNeeds:
    """The needs of a worker on TensorRT-LLM. Raises ConfigError for wrong engine arguments."""
    # Imported here because `--help` does not need its libraries.
    from trtllm_disagg.config.engine_args import build_engine_args

    args: Mapping[str, Any] = build_engine_args(config)
    cache = args.get("kv_cache_config")
    fraction = cache.get("free_gpu_memory_fraction") if isinstance(cache, Mapping) else None
    return GpuNeeds(
        num_ranks(args), _FRACTION if fraction is None else float(fraction), shutdown_seconds(config)
    )


def longest_sequence(configs: Iterable[WorkerConfig]) -> int | None:
    """The largest max_seq_len of these workers; None where none is known."""
    from trtllm_disagg.config.engine_args import build_engine_args
    from trtllm_disagg.worker.model_facts import read_model_facts

    longest = 0
    for config in configs:
        with suppress(ConfigError):  # the worker reports what is wrong
            given = build_engine_args(config).get("max_seq_len")
            longest = max(longest, given or read_model_facts(config.model).max_positions or 0)
    return longest or None


def shutdown_seconds(config: WorkerConfig) -> float:
    """How long a worker's engine may take to shut down. For the engine 0 means no limit; here there has to be one."""
    # Imported here because `--help` does not need its libraries.
    from trtllm_disagg.engine.health import TIMES

    return config.engine_health_shutdown_timeout or TIMES.shutdown


def num_ranks(engine_args: Mapping[str, Any]) -> int:
    """The number of ranks of one worker; each has its own GPU, if the engine runs on GPUs."""
    return math.prod(int(engine_args.get(name) or 1) for name in PARALLEL_SIZES)


def parse_gpus(key: str, text: str, machine: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """A list of indices or UUIDs, as in CUDA_VISIBLE_DEVICES: CUDA sees those before a -1. Raises ConfigError for one
    that is there twice, or that is not in `machine`, its GPUs' UUIDs by index, if that is known.
    """
    devices = tuple(takewhile("-1".__ne__, (device.strip() for device in text.split(","))))
    indices = [_index_of(device, machine or {}) for device in devices]
    if not all(devices) or len(set(indices)) != len(indices):
        raise ConfigError.bad_value(key, text, "different GPUs, as in 0,1,2,3")
    if None in indices:
        raise ConfigError.bad_value(
            key, text, f"GPUs of this machine: {','.join(machine or ())}, or their UUIDs"
        )
    return devices


def _index_of(device: str, machine: Mapping[str, str]) -> str | None:
    """None for a GPU that is not there. Of a UUID its beginning is enough; a part of a GPU has a UUID of its own."""
    if not machine or device in machine or device.startswith("MIG-"):
        return device
    found = [index for index, uuid in machine.items() if uuid.startswith(device)]
    return found[0] if len(found) == 1 else None


def present_gpus() -> dict[str, str]:
    """The UUIDs of this machine's GPUs by index, as nvidia-smi says; without it, those of the driver's directory, which
    containers may lack. Neither knows CUDA_VISIBLE_DEVICES.
    """
    command = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        # Both count in the order of the bus.
        files = sorted(_DRIVER.glob("*/information"))
        uuids = (re.search(r"^GPU UUID:\s*(\S+)", file.read_text(), re.MULTILINE) for file in files)
        return {str(index): found[1] if found else "" for index, found in enumerate(uuids)}
    return dict(re.findall(r"^(\d+), *(\S+)$", said, re.MULTILINE))
