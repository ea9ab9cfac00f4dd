"""Assigns GPUs to the workers of a deployment, by CUDA_VISIBLE_DEVICES.

Prefill workers take them from the front of the list and decode workers from its end, so both roles can grow without
sharing. Workers share a GPU only if their fractions of its memory sum to at most 1.
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
from trtllm_disagg.engine.table import ENGINES, resolve_engine
from trtllm_disagg.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
#: As in Dynamo's launch scripts.
ROLE_VARIABLES: Mapping[str, str] = {
    "agg": "AGG_CUDA_VISIBLE_DEVICES",
    "prefill": "PREFILL_CUDA_VISIBLE_DEVICES",
    "decode": "DECODE_CUDA_VISIBLE_DEVICES",
}
#: Their product is the number of GPUs per worker.
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
#: TensorRT-LLM's default free_gpu_memory_fraction.
_FRACTION = 0.9
_DRIVER = Path("/proc/driver/nvidia/gpus")
#: Without its daemon, the driver loads for each call, which takes seconds with many GPUs.
_SMI_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    num_gpus: int
    #: Fraction of each GPU's memory for KV.
    fraction: float
    #: Max time for the engine to shut down.
    shutdown_seconds: float


@dataclass(frozen=True, slots=True)
class Gpus:
    """All devices, and the needs per role. A role without needs gets no devices."""

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: Mapping[str, GpuNeeds] = field(default_factory=dict)

    def environment(self, role: str, others: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
        """The variables of one more worker. `others`: the roles and environments of the others. Raises ConfigError if
        no GPU has room.
        """
        if role not in self.needs:
            return {}
        need, used = self.needs[role], self._used(others)
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

    def _used(self, others: Iterable[tuple[str, Mapping[str, str]]]) -> Mapping[str, float]:
        """Device -> used fraction of its memory."""
        used: defaultdict[str, float] = defaultdict(float)
        for role, environment in others:
            for device in environment.get(VARIABLE, "").split(",") if role in self.needs else ():
                used[device] += self.needs[role].fraction
        return used

    def _groups(self, role: str, size: int) -> list[tuple[str, ...]]:
        """Neighbouring devices for one worker, in order of preference."""
        devices = self.devices[role]
        if size > len(devices):
            allowed = f"at least {size}: each {role} worker has {' x '.join(PARALLEL_SIZES)} of them"
            raise ConfigError.bad_value("--gpus", ",".join(devices), allowed)
        last = len(devices) - size
        starts = range(last, -1, -size) if role == "decode" else range(0, last + 1, size)
        return [devices[start : start + size] for start in starts]


NO_GPUS = Gpus()


def gpus_of(
    workers: Mapping[str, WorkerConfig],
    given: str | None,
    environ: Mapping[str, str],
    present: Callable[[], Mapping[str, str]] | None = None,
) -> Gpus:
    """The GPUs for `workers` (by role): from `given` (--gpus), else each role's variable, else CUDA_VISIBLE_DEVICES,
    else `present` (see `present_gpus`).

    Returns NO_GPUS if no engine uses GPUs, or none is found, which the engine then reports. Raises ConfigError.
    """
    on_gpus = {role: each for role, each in workers.items() if ENGINES[each.engine].is_tensorrt_llm}
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
    """Resolves `auto` to an engine. Skips workers with wrong arguments, which the worker itself refuses."""
    for role, arguments in workers.items():
        with suppress(ConfigError):
            config = parse_worker_flags(arguments, environ, ignores_unknown=True, is_elsewhere=True)
            yield role, replace(config, engine=resolve_engine(config.engine))


def gpu_needs_of(config: WorkerConfig) -> GpuNeeds:
    """The needs of a TensorRT-LLM worker. Raises ConfigError for wrong engine arguments."""
    # Imported late, because `--help` does not need its libraries.
    from trtllm_disagg.config.engine_args import build_engine_args

    args: Mapping[str, Any] = build_engine_args(config)
    cache = args.get("kv_cache_config")
    fraction = cache.get("free_gpu_memory_fraction") if isinstance(cache, Mapping) else None
    return GpuNeeds(
        num_ranks(args), _FRACTION if fraction is None else float(fraction), shutdown_seconds(config)
    )


def longest_sequence(configs: Iterable[WorkerConfig]) -> int | None:
    """The largest max_seq_len of these workers; None if unknown."""
    from trtllm_disagg.config.engine_args import build_engine_args
    from trtllm_disagg.worker.model_facts import read_model_facts

    longest = 0
    for config in configs:
        with suppress(ConfigError):  # the worker reports it
            given = build_engine_args(config).get("max_seq_len")
            longest = max(longest, given or read_model_facts(config.model).max_positions or 0)
    return longest or None


def shutdown_seconds(config: WorkerConfig) -> float:
    """Max seconds for a worker's engine to shut down. The engine's 0 means no limit; here it needs one."""
    from trtllm_disagg.engine.health import TIMES

    return config.engine_health_shutdown_timeout or TIMES.shutdown


def num_ranks(engine_args: Mapping[str, Any]) -> int:
    """Number of ranks of a worker; on GPUs, each rank has its own."""
    return math.prod(int(engine_args.get(name) or 1) for name in PARALLEL_SIZES)


def parse_gpus(key: str, text: str, machine: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Parses indices or UUIDs as CUDA_VISIBLE_DEVICES does, up to a -1. Raises ConfigError for duplicates, and for GPUs
    that are not in `machine` (index -> UUID), if known.
    """
    devices = tuple(takewhile("-1".__ne__, (device.strip() for device in text.split(","))))
    indices = [_index_of(device, machine or {}) for device in devices]
    if not all(devices) or len(set(indices)) != len(indices):
        raise ConfigError.bad_value(key, text, "different GPUs, as in 0,1,2,3")
    if None in indices:
        allowed = f"GPUs of this machine: {','.join(machine or ())}, or their UUIDs"
        raise ConfigError.bad_value(key, text, allowed)
    return devices


def _index_of(device: str, machine: Mapping[str, str]) -> str | None:
    """None for an absent GPU. The start of a UUID is enough; a part of a GPU has its own UUID."""
    if not machine or device in machine or device.startswith("MIG-"):
        return device
    found = [index for index, uuid in machine.items() if uuid.startswith(device)]
    return found[0] if len(found) == 1 else None


def present_gpus() -> dict[str, str]:
    """Index -> UUID of this machine's GPUs, by nvidia-smi, else by the driver's directory, which containers may lack.
    Both ignore CUDA_VISIBLE_DEVICES.
    """
    command = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        # Both count in bus order.
        files = sorted(_DRIVER.glob("*/information"))
        uuids = (re.search(r"^GPU UUID:\s*(\S+)", file.read_text(), re.MULTILINE) for file in files)
        return {str(index): found[1] if found else "" for index, found in enumerate(uuids)}
    return dict(re.findall(r"^(\d+), *(\S+)$", said, re.MULTILINE))
