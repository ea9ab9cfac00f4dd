"""The memory that an engine may take: the machine's, or what a container leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.engines.embedded.params.model_shape import available_bytes

GIB = 1 << 30
MACHINE = 100 * GIB
STAT = "anon 5\ninactive_file 300\nactive_file 20\nshmem 7\n"
STAT_V1 = "cache 9\ntotal_inactive_file 300\ntotal_active_file 20\n"


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def limited(limit: str, used: int) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": STAT}


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


V1 = {"memory.limit_in_bytes": f"{8 * GIB}", "memory.usage_in_bytes": f"{GIB}", "memory.stat": STAT_V1}


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        (None, {}, MACHINE),
        # The page cache of a container is available.
        ("0::/", limited(str(8 * GIB), GIB), 7 * GIB + 320),
        ("5:cpu:/docker/12ab\n4:memory:/docker/12ab\n0::/", within("memory", V1), 7 * GIB + 320),
        (
            "0::/slice/unit",
            within("slice/unit", limited("max", GIB)) | within("slice", limited(str(4 * GIB), GIB)),
            3 * GIB + 320,
        ),
        ("0::/", limited("max", GIB), MACHINE),
        ("0::/", limited(str(MACHINE * 9), GIB), MACHINE),
        ("0::/", limited(str(GIB), 2 * GIB), 0),
    ],
    ids=[
        "no groups",
        "container",
        "version 1",
        "tightest of several",
        "no limit",
        "above",
        "beyond its limit",
    ],
)
def test_free_memory_is_the_machines_or_what_its_tightest_control_group_leaves(
    tmp_path: Path, groups: str | None, files: dict[str, str], left: int
) -> None:
    proc = written(tmp_path / "proc", {"meminfo": f"MemTotal: 9 kB\nMemAvailable: {MACHINE // 1024} kB\n"})
    if groups is not None:
        written(proc, {"self/cgroup": f"{groups}\n"})
    assert available_bytes(proc, written(tmp_path / "cgroup", files)) == left


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
