"""What launch/ asks before it starts workers. `python -m trtllm_disagg.deployment.for_scripts`, and one of:

`ranks ARG...`, with the arguments that a worker will be started with, prints four words: the number of its ranks,
whether each has a GPU (yes or no), what `srun --mpi` has to be, and the program that runs in every rank, if there is
one.

`gpus ARG... [-- ARG...]`, with the arguments of each worker: do they fit side by side on the GPUs that the script
gives them? Ends with 1 and says why when they do not.

`placement GPUS_PER_NODE GPUS NODES ROLE:WORKERS:RANKS...`, for launch/slurm/, prints a line a worker: its role, its
nodes, how many these are, its ranks, those of each node, and the GPUs that it may have there (`-` without GPUs).
GPUS_PER_NODE is a number (`-` without GPUs), GPUS are those of every node that may be used (2,3, or `-` for all), NODES
has commas too. A worker that needs more than one node gets whole ones, all others share nodes, and none has GPUs on two
nodes where one would do.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, groupby

from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.deployment.gpus import (
    ROLE_VARIABLES,
    VARIABLE,
    gpus_of,
    num_ranks,
    parse_gpus,
    read_worker,
)
from trtllm_disagg.engine.engines import ENGINES
from trtllm_disagg.errors import ERROR_PREFIX, ConfigError

_NONE = "-"
#: What launch/slurm/ takes the GPUs of a node from.
_PER_NODE, _OF_ROLE = "GPUS_PER_NODE", f"ROLE_{VARIABLE}"


def describe_ranks(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Raises ConfigError for what the worker would refuse."""
    config = read_worker(arguments, environ)
    engine = ENGINES[config.engine]
    on_gpus = "yes" if engine.is_tensorrt_llm else "no"
    return (
        f"{num_ranks(build_engine_args(config))} {on_gpus} {engine.srun_mpi} {engine.rank_launcher}".rstrip()
    )


def require_room(workers: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> None:
    """For workers that are started one by one. Each takes the first GPUs of its role's variable, or of
    CUDA_VISIBLE_DEVICES. Raises ConfigError where they are too few, or two workers need more memory of one than it has.
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


def _workers_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Of workers with valid arguments; the others report their own errors."""
    found: dict[str, list[str]] = {}
    for is_end, words in groupby(arguments, lambda word: word == "--"):
        with suppress(ConfigError):
            if not is_end:
                config = read_worker(command := list(words), os.environ)
                build_engine_args(config)
                found[config.role.value] = command
    return found


@dataclass(frozen=True, slots=True)
class Workers:
    """All of one role."""

    role: str
    count: int
    #: Of each of them.
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Workers:
        role, count, ranks = text.split(":")
        if not count.isdecimal() or count == "0":
            raise ConfigError.bad_value(f"{role.upper()}_WORKERS", count, "a number from 1 up")
        return cls(role, int(count), int(ranks))


@dataclass(frozen=True, slots=True)
class Place:
    """Of one worker."""

    role: str
    nodes: tuple[str, ...]
    ranks: int
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        per_node = self.ranks // len(self.nodes)
        gpus = ",".join(self.gpus) or _NONE
        return f"{self.role} {','.join(self.nodes)} {len(self.nodes)} {self.ranks} {per_node} {gpus}"


def gpus_of_node(per_node: str, given: str) -> tuple[str, ...]:
    """Raises ConfigError for a number that no GPU of a node has. A UUID is the node's to know."""
    if per_node == _NONE:
        return ()
    number = int(per_node)
    gpus = tuple(map(str, range(number))) if given == _NONE else parse_gpus(_OF_ROLE, given)
    if any(gpu.isdecimal() and int(gpu) >= number for gpu in gpus):
        allowed = f"GPUs from 0 to {number - 1}: a node has {number} of them ({_PER_NODE})"
        raise ConfigError.bad_value(_OF_ROLE, given, allowed)
    return gpus


def place(every: Sequence[Workers], nodes: Sequence[str], gpus: Sequence[str]) -> list[Place]:
    """In the order of `every`. Raises ConfigError where they do not fit."""
    if not gpus:
        # Ranks without GPUs are those of the embedded engine: all on one host.
        free_nodes = cycle(nodes)
        return [
            Place(workers.role, (next(free_nodes),), workers.ranks, ())
            for workers in every
            for _ in range(workers.count)
        ]
    return _place_on_gpus(every, nodes, gpus)


def _place_on_gpus(every: Sequence[Workers], nodes: Sequence[str], gpus: Sequence[str]) -> list[Place]:
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
        case ["placement", per_node, given, nodes, *groups]:
            every = [Workers.parse(group) for group in groups]
            print(*place(every, nodes.split(","), gpus_of_node(per_node, given)), sep="\n")
        case _:
            raise ConfigError("for_scripts: ranks, gpus or placement, and what it needs")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{ERROR_PREFIX}{error}")
