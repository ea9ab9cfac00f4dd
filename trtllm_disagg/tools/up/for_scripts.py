"""Computes for the scripts in launch/ before they start workers: `python -m trtllm_disagg.tools.up.for_scripts`,
with:

`ranks ARG...`, the arguments of a worker: prints the number of its ranks, whether each rank has a GPU (yes or no), the
value of `srun --mpi`, and the program that starts each rank, if there is one.

`gpus ARG... [-- ARG...]`, the arguments of each worker: checks that the workers fit side by side on the GPUs that the
script gives them. Exits with 1 and the reason when they do not.

`stop ARG... [-- ARG...]`, the arguments of each worker: prints after how many seconds a script kills a process that it
has told to stop.

`placement GPUS_PER_NODE GPUS NODES ROLE:WORKERS:RANKS...`, for launch/slurm/: prints one line for each worker with its
role, its nodes, their number, its ranks, its ranks on each node, and its GPUs there (`-` without GPUs). GPUS_PER_NODE
is a number (`-` without GPUs), GPUS lists the usable GPUs of every node (2,3, or `-` for all), NODES is a list with
commas, too. A worker that needs several nodes gets whole nodes. All others share nodes, and never span two.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, groupby

from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import WorkerConfig
from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError
from trtllm_disagg.tools.up.gpus import (
    ROLE_VARIABLES,
    VARIABLE,
    gpus_of,
    num_ranks,
    parse_gpus,
    read_worker,
    shutdown_seconds,
)
from trtllm_disagg.tools.up.plan import BEYOND_DRAIN_SECONDS

_NONE = "-"
#: In place of a model that may be in a container of the nodes: nothing is read of its files.
_ANY_MODEL = "model"
#: The variables of launch/slurm/ for the GPUs of a node, for error messages.
_PER_NODE, _OF_ROLE = "GPUS_PER_NODE", f"ROLE_{VARIABLE}"


def _read(arguments: Sequence[str], environ: Mapping[str, str]) -> WorkerConfig:
    """The configuration of a worker, which may start in a container or on another machine, so that its model is there.
    Raises ConfigError.
    """
    return replace(read_worker(arguments, environ), model=_ANY_MODEL)


def describe_ranks(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """The output of `ranks`. Raises ConfigError for arguments that the worker would refuse."""
    config = _read(arguments, environ)
    engine = ENGINES[config.engine]
    on_gpus = "yes" if engine.is_tensorrt_llm else "no"
    return (
        f"{num_ranks(build_engine_args(config))} {on_gpus} {engine.srun_mpi} {engine.rank_launcher}".rstrip()
    )


def require_room(workers: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
    """For workers that are started one by one, each on the first GPUs of its role's variable, or of
    CUDA_VISIBLE_DEVICES. Raises ConfigError for too few GPUs, or for workers that together need too much memory of one.
    """
    gpus = gpus_of(workers, None, environ, present=tuple)
    shares: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for role, need in gpus.needs.items():
        devices, variable = gpus.devices[role], ROLE_VARIABLES[role]
        if len(devices) < need.num_gpus:
            name = variable if environ.get(variable) else VARIABLE
            raise ConfigError.bad_value(
                name, ",".join(devices), f"at least {need.num_gpus}: so many the {role} worker has"
            )
        for device in devices[: need.num_gpus]:
            shares[device][role] = need.fraction
    for device, of_roles in shares.items():
        if sum(of_roles.values()) > 1 + 1e-9:
            fractions = " and ".join(f"{fraction:g} for {role}" for role, fraction in of_roles.items())
            names = " and ".join(ROLE_VARIABLES[role] for role in of_roles)
            raise ConfigError.bad_value(
                names,
                device,
                "GPUs of their own, or kv_cache_config.free_gpu_memory_fraction that add up to at most 1 on one that "
                f"they share; they are {fractions}",
            )


def stop_seconds(workers: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> int:
    """Whole seconds in which each of these workers drains and ends its engine."""
    configs = [_read(arguments, environ) for arguments in workers.values()]
    slowest = max(
        (
            config.drain_seconds + (shutdown_seconds(config) if config.engine_spec.is_tensorrt_llm else 0.0)
            for config in configs
        ),
        default=0.0,
    )
    return math.ceil(slowest + BEYOND_DRAIN_SECONDS)


def _workers_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Role -> arguments, without workers that have wrong arguments: those report their own errors."""
    found: dict[str, list[str]] = {}
    for is_end, words in groupby(arguments, lambda word: word == "--"):
        with suppress(ConfigError):
            if not is_end:
                config = _read(command := list(words), os.environ)
                build_engine_args(config)
                found[config.role.value] = command
    return found


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The number of workers of one role."""

    role: str
    count: int
    #: Ranks of each worker.
    ranks: int

    @classmethod
    def parse(cls, text: str) -> WorkerGroup:
        role, count, ranks = text.split(":")
        if not count.isdecimal() or count == "0":
            raise ConfigError.bad_value(f"{role.upper()}_WORKERS", count, "a number from 1 up")
        return cls(role, int(count), int(ranks))


@dataclass(frozen=True, slots=True)
class Place:
    """The nodes and GPUs of one worker."""

    role: str
    nodes: tuple[str, ...]
    ranks: int
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        per_node = self.ranks // len(self.nodes)
        gpus = ",".join(self.gpus) or _NONE
        return f"{self.role} {','.join(self.nodes)} {len(self.nodes)} {self.ranks} {per_node} {gpus}"


def gpus_of_node(per_node: str, given: str) -> tuple[str, ...]:
    """The GPUs of each node. Raises ConfigError for a number that is too high; UUIDs cannot be checked here."""
    if per_node == _NONE:
        return ()
    number = int(per_node)
    gpus = tuple(map(str, range(number))) if given == _NONE else parse_gpus(_OF_ROLE, given)
    if any(gpu.isdecimal() and int(gpu) >= number for gpu in gpus):
        allowed = f"GPUs from 0 to {number - 1}: a node has {number} of them ({_PER_NODE})"
        raise ConfigError.bad_value(_OF_ROLE, given, allowed)
    return gpus


def place(every: Sequence[WorkerGroup], nodes: Sequence[str], gpus: Sequence[str]) -> list[Place]:
    """The place of each worker, in the order of `every`. Raises ConfigError when they do not fit."""
    if not gpus:
        # All ranks of an engine without GPUs, which is the embedded engine, run on one host.
        free_nodes = cycle(nodes)
        return [
            Place(workers.role, (next(free_nodes),), workers.ranks, ())
            for workers in every
            for _ in range(workers.count)
        ]
    return _place_on_gpus(every, nodes, gpus)


def _place_on_gpus(every: Sequence[WorkerGroup], nodes: Sequence[str], gpus: Sequence[str]) -> list[Place]:
    free = {node: tuple(gpus) for node in nodes}
    places = []
    for workers in every:
        ranks = workers.ranks
        whole = -(-ranks // len(gpus))
        if ranks > len(gpus) and ranks % len(gpus):
            raise ConfigError(
                f"a {workers.role} worker has {ranks} ranks, and a node {len(gpus)} GPUs: a worker over several nodes "
                "needs all GPUs of each"
            )
        share = min(ranks, len(gpus))
        for _ in range(workers.count):
            found = [node for node, left in free.items() if len(left) >= share][:whole]
            if len(found) < whole:
                raise ConfigError(
                    f"{len(nodes)} nodes with {len(gpus)} GPUs each have no room for "
                    + " and ".join(
                        f"{each.count} {each.role} workers of {each.ranks} ranks" for each in every
                    )
                    + f"; expected more nodes, or more GPUs in {_PER_NODE} or {_OF_ROLE}"
                )
            places.append(Place(workers.role, tuple(found), ranks, free[found[0]][:share]))
            for node in found:
                free[node] = free[node][share:]
    return places


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case ["ranks", *words]:
            print(describe_ranks(words, os.environ))
        case ["gpus", *words]:
            require_room(_workers_of(words), os.environ)
        case ["stop", *words]:
            print(stop_seconds(_workers_of(words), os.environ))
        case ["placement", per_node, given, nodes, *groups]:
            every = [WorkerGroup.parse(group) for group in groups]
            print(*place(every, nodes.split(","), gpus_of_node(per_node, given)), sep="\n")
        case _:
            raise ConfigError("for_scripts: ranks, gpus, stop or placement, and what it needs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{ERROR_PREFIX}{error}")
