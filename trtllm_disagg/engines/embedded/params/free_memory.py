"""How much memory this process could still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
#: The folder of a hierarchy that limits memory, by the controllers that /proc/self/cgroup names: version 2, version 1.
_HIERARCHIES = {"": ".", "memory": "memory"}
#: Files of a control group: its limit and what it uses, in version 2 and in version 1.
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
#: Lines of memory.stat: the page cache in version 2 and in version 1, without what lies in /dev/shm.
_CACHES = ({"inactive_file", "active_file"}, {"total_inactive_file", "total_active_file"})


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Memory that could be taken without swapping, and within the limits of a container; the page cache counts as
    available.
    """
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    of_machine = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([of_machine, *_left_by_limits(proc, cgroups)]))


def _left_by_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    for group in _control_groups(proc, cgroups):
        for (limit, used), caches in zip(_LIMITS, _CACHES, strict=True):
            # No such file: another version. No number: "max".
            with suppress(OSError, ValueError):
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                yield most - taken + _cached(group, caches)


def _control_groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """From this process's own up to the root, which in a container is the container's."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if (folder := _HIERARCHIES.get(controllers)) is not None:
                own = Path(path.lstrip("/"))
                yield from (cgroups / folder / each for each in (own, *own.parents))


def _cached(group: Path, names: set[str]) -> int:
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(number) for name, number in lines if name in names)
