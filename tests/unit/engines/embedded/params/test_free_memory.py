"""The memory that an engine may take: the machine's, or what a container leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.engines.embedded.params.model_shape import available_bytes

GIB = 1 << 30
MACHINE = 100 * GIB
STAT = "anon 5\ninactive_file 300\nactive_file 20\nshmem 7\n"
STAT_V1 = "cache 9\ntotal_inactive_file 300\ntotal_active_file 20\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return written(tmp_path / "proc", {"meminfo": f"MemTotal: 9 kB\nMemAvailable: {MACHINE // 1024} kB\n"})


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def limited(limit: str, used: int) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": STAT}


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_without_control_groups_it_is_the_machines(proc: Path, cgroups: Path) -> None:
    assert available_bytes(proc, cgroups) == MACHINE


def test_a_container_leaves_its_limit_less_what_it_uses(proc: Path, cgroups: Path) -> None:
    written(proc, {"self/cgroup": "0::/\n"})
    written(cgroups, limited(str(8 * GIB), GIB))
    assert available_bytes(proc, cgroups) == 7 * GIB + 320, "its page cache is available"


def test_a_container_of_version_1_leaves_its_limit_less_what_it_uses(proc: Path, cgroups: Path) -> None:
    written(proc, {"self/cgroup": "5:cpu:/docker/12ab\n4:memory:/docker/12ab\n0::/\n"})
    files = {"memory.limit_in_bytes": f"{8 * GIB}", "memory.usage_in_bytes": f"{GIB}", "memory.stat": STAT_V1}
    written(cgroups, within("memory", files))
    assert available_bytes(proc, cgroups) == 7 * GIB + 320


def test_the_tightest_of_the_groups_around_a_process_counts(proc: Path, cgroups: Path) -> None:
    written(proc, {"self/cgroup": "0::/slice/unit\n"})
    written(cgroups, within("slice/unit", limited("max", GIB)))
    written(cgroups, within("slice", limited(str(4 * GIB), GIB)))
    assert available_bytes(proc, cgroups) == 3 * GIB + 320


@pytest.mark.parametrize("limit", ["max", str(MACHINE * 9)])
def test_a_group_without_a_limit_below_the_machines_changes_nothing(
    proc: Path, cgroups: Path, limit: str
) -> None:
    written(proc, {"self/cgroup": "0::/\n"})
    written(cgroups, limited(limit, GIB))
    assert available_bytes(proc, cgroups) == MACHINE


def test_a_group_beyond_its_limit_leaves_nothing(proc: Path, cgroups: Path) -> None:
    written(proc, {"self/cgroup": "0::/\n"})
    written(cgroups, limited(str(GIB), 2 * GIB))
    assert available_bytes(proc, cgroups) == 0


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
