"""For launch/slurm/: which nodes, and which GPUs of them, each worker of a deployment gets.

`python -m trtllm_disagg.deployment.placement GPUS NODES ROLE:WORKERS:RANKS...` prints a line a worker: its role, its
nodes, how many these are, its ranks, those of each node, and the GPUs that it may have there (`-` without GPUs). GPUS
are those of every node (0,1,2,3, or `-`), NODES has commas too. A worker that needs more than one node gets whole ones,
all others share nodes, and none has GPUs on two nodes where one would do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from trtllm_disagg.errors import ERROR_PREFIX, ConfigError

_NONE = "-"


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
                )
            places.append(Place(workers.role, tuple(found), ranks, free[found[0]][:share]))
            for node in found:
                free[node] = free[node][share:]
    return places


def _split(text: str) -> list[str]:
    return [] if text == _NONE else text.split(",")


if __name__ == "__main__":
    try:
        gpus_of_each, all_nodes, *groups = sys.argv[1:]
        everything = [Workers.parse(group) for group in groups]
        print(*place(everything, _split(all_nodes), _split(gpus_of_each)), sep="\n")
    except ConfigError as error:
        sys.exit(f"{ERROR_PREFIX}{error}")
