"""Each house and each room has a line budget. A bigger budget is a decision: docs/decisions/0032-three-houses.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trtllm_disagg"

#: Lines.
HOUSES = {"plugin": 19_125, "engines": 19_835, "tools": 11_545}
ROOMS = {
    "(top)": 910,
    "admin": 260,
    "common": 1_150,
    "config": 2_225,
    "dynamo_runtime": 2_530,
    "engine": 2_485,
    "engines": 5,
    "engines/demo_model": 1_105,
    "engines/embedded": 60,
    "engines/embedded/api": 1_425,
    "engines/embedded/connector": 780,
    "engines/embedded/core": 1_240,
    "engines/embedded/cpu_kernels": 2_630,
    "engines/embedded/ipc": 610,
    "engines/embedded/kv_cache": 700,
    "engines/embedded/kv_transfer": 2_565,
    "engines/embedded/model": 2_435,
    "engines/embedded/params": 1_515,
    "engines/embedded/scheduler": 850,
    "engines/embedded/tensor_parallel": 1_405,
    "engines/modelled": 1_035,
    "engines/recording": 1_505,
    "handlers": 4_745,
    "prefill_queue": 835,
    "tools": 80,
    "tools/admin": 1_150,
    "tools/demo": 285,
    "tools/doctor": 1_580,
    "tools/plan": 1_810,
    "tools/top": 1_000,
    "tools/trace": 830,
    "tools/up": 4_825,
    "tracing": 655,
    "wire": 1_055,
    "worker": 2_290,
}
MAX_FILES = 278
MAX_WRAPPERS = 0


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def room_of(path: Path) -> str:
    """Path relative to the package; a house's folders are rooms of their own, and so are the embedded engine's."""
    *folders, _ = path.parts
    depth = 1 if not folders or folders[0] not in HOUSES else 3 if folders[1:2] == ["embedded"] else 2
    return "/".join(folders[:depth]) or "(top)"


def package() -> Iterator[tuple[Path, int]]:
    """Every file of the product, relative to the package, and its lines. `handlers/` is a folder at the top."""
    for folder, prefix in ((PACKAGE, "."), (ROOT / "handlers", "handlers")):
        for path in folder.rglob("*.py"):
            yield Path(prefix, path.relative_to(folder)), lines(path)


SIZES = dict(package())


def test_every_house_keeps_its_budget() -> None:
    sizes = Counter[str]()
    for path, size in SIZES.items():
        house = path.parts[0]
        sizes[house if house in HOUSES else "plugin"] += size
    over = {house: size for house, size in sizes.items() if size > HOUSES[house]}
    assert not over, f"budgets are {HOUSES}: {__doc__}"


def test_every_room_keeps_its_budget_and_no_room_is_new() -> None:
    sizes = Counter[str]()
    for path, size in SIZES.items():
        sizes[room_of(path)] += size
    over = {room: size for room, size in sizes.items() if size > ROOMS.get(room, 0)}
    assert not over, __doc__
    assert sizes.keys() == ROOMS.keys()


def test_there_are_no_more_files_than_a_reader_can_keep() -> None:
    assert len(SIZES) <= MAX_FILES, __doc__


@pytest.mark.parametrize(
    ("folder", "suffixes", "max_lines"),
    [
        ("tests", {".py"}, 60_775),
        ("scripts", {".py"}, 1_945),
        ("benchmarks", {".py"}, 4_000),
        ("examples", {".py"}, 105),
        ("launch", {".sh", ".py", ".sbatch", ""}, 200),
    ],
)
def test_what_stands_beside_the_package_keeps_its_budget(
    folder: str, suffixes: set[str], max_lines: int
) -> None:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in suffixes)
    assert sum(lines(path) for path in files if "__pycache__" not in path.parts) <= max_lines, __doc__


@pytest.mark.parametrize(("pattern", "max_words"), [("docs/**/*.md", 50_450), ("CHANGELOG.md", 1_500)])
def test_texts_keep_their_budget_of_words(pattern: str, max_words: int) -> None:
    assert sum(len(re.findall(r"\S+", path.read_text())) for path in ROOT.glob(pattern)) <= max_words, __doc__


def test_no_more_functions_wrap_one_request_in_another() -> None:
    """A token passes through each of them: functions that take and return a Generate or a phase."""
    phase = re.compile(r"\b(Generate|PrefillPhase|DecodePhase)\b")
    wrappers = [
        node.name
        for path in (*PACKAGE.rglob("*.py"), *(ROOT / "handlers").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.returns is not None
        and phase.fullmatch(ast.unparse(node.returns))
        and phase.search(ast.unparse(node.args))
    ]
    assert len(wrappers) <= MAX_WRAPPERS, wrappers
