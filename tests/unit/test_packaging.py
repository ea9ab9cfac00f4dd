"""What is built from this tree: every module, the handlers folder under its name in the package, no tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import trtllm_disagg
from scripts.release import build
from trtllm_disagg.common.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = "trtllm_disagg"
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "*.log", "node_modules")

#: Of the builds, in seconds; any that zip archives know.
EPOCH = 1_700_000_000

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Built:
    """A source distribution, and the wheel that was built from that."""

    source: Path
    sdist: Path
    wheel: Path

    @property
    def wheel_files(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    @property
    def sdist_files(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            # The first part is the name with the version.
            return {name.partition("/")[2] for name in archive.getnames()}


def run(command: Sequence[object], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    result: subprocess.CompletedProcess[str] = done
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, as a bare checkout has it."""
    folder = tmp_path_factory.mktemp("build")
    source, out = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return Built(source, *build(source, out, EPOCH))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a new environment that has this wheel and nothing else."""
    environment = tmp_path_factory.mktemp("environment")
    assert run([sys.executable, "-m", "venv", "--without-pip", environment]).returncode == 0
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q"]
    done = run([*pip, built.wheel])
    assert done.returncode == 0, done.stderr
    return environment / "bin"


def test_handlers_is_a_link_to_the_top_level_folder() -> None:
    link = ROOT / PACKAGE / "handlers"
    assert link.is_symlink()
    assert link.readlink() == Path("../handlers")


def test_the_version_of_what_is_built_is_that_of_the_code(built: Built) -> None:
    assert "version" not in PYPROJECT["project"]
    assert built.wheel.name.split("-")[1] == trtllm_disagg.__version__
    assert built.sdist.name == f"{PACKAGE}-{trtllm_disagg.__version__}.tar.gz"


def test_two_builds_in_different_places_at_different_times_are_the_same_bytes(
    built: Built, tmp_path: Path
) -> None:
    source = tmp_path / "elsewhere"
    shutil.copytree(built.source, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for path in [source, *source.rglob("*")]:
        os.utime(path, (1, 1), follow_symlinks=False)
        if not path.is_symlink() and path.is_file():
            path.chmod(path.stat().st_mode | 0o022)
    sdist, wheel = build(source, tmp_path / "dist", EPOCH)
    assert sdist.read_bytes() == built.sdist.read_bytes()
    assert wheel.read_bytes() == built.wheel.read_bytes()


def test_the_wheel_has_the_engine_files_and_the_launch_scripts(built: Built) -> None:
    share = f"{PACKAGE}-{trtllm_disagg.__version__}.data/data/share/trtllm-disagg/"
    there = {name.removeprefix(share) for name in built.wheel_files if name.startswith(share)}
    folders = (ROOT / "engine_configs", ROOT / "launch")
    files = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".yaml", ".sh", ".env")
    ]
    assert there == {str(path.relative_to(ROOT)) for path in files}
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.getinfo(f"{share}launch/disagg.sh").external_attr >> 16 & 0o111 == 0o111


def test_engine_files_of_an_installed_wheel_are_found_by_name(installed: Path, tmp_path: Path) -> None:
    find = "from trtllm_disagg.config.yaml_file import Path, shipped; print(*map(shipped, map(Path, %r)))"
    names = ["demo", "engine_configs/demo/agg.yaml", "no/demo"]
    done = run([installed / "python", "-I", "-c", find % names], cwd=tmp_path)
    there = (installed.parent / "share/trtllm-disagg/engine_configs/demo").resolve()
    assert done.stdout.split() == [str(there), str(there / "agg.yaml"), "no/demo"], done.stderr


def test_the_source_distribution_has_docs_and_tests(built: Built) -> None:
    assert {
        "docs/index.md",
        "mkdocs.yml",
        "tests/unit/test_packaging.py",
        "scripts/release.py",
        "Makefile",
    } <= (built.sdist_files)
    assert not any("__pycache__" in name or name.startswith((".ci", ".cache")) for name in built.sdist_files)


def test_the_wheel_has_every_module(built: Built) -> None:
    package = built.source / PACKAGE
    files = [*package.rglob("*.py"), *(package / "handlers").rglob("*.py")]
    modules = {str(file.relative_to(built.source)) for file in files}
    assert {f"{PACKAGE}/handlers/chain.py", f"{PACKAGE}/handlers/strategies/router.py"} <= modules
    in_wheel = {name for name in built.wheel_files if name.endswith(".py")}
    assert in_wheel == modules


def test_the_wheel_is_typed_and_licensed_and_has_nothing_else(built: Built) -> None:
    others = {name for name in built.wheel_files if not name.endswith(".py")}
    assert f"{PACKAGE}/py.typed" in others
    tops = {name.partition("/")[0] for name in built.wheel_files}
    assert tops == {
        PACKAGE,
        *(f"{PACKAGE}-{trtllm_disagg.__version__}.{kind}" for kind in ("data", "dist-info")),
    }
    assert any(name.endswith("licenses/LICENSE") for name in others)
    assert not any("test_" in name or name.startswith("tests/") for name in built.wheel_files)


def test_version_and_help_need_no_dependency(installed: Path) -> None:
    version = run([installed / "trtllm-disagg", "--version"])
    assert (version.returncode, version.stdout, version.stderr) == (0, f"{trtllm_disagg.__version__}\n", "")
    usage = run([installed / "trtllm-disagg", "--help"])
    assert (usage.returncode, usage.stderr) == (0, "")
    assert all(command in usage.stdout for command in COMMANDS)
    module = run([installed / "python", "-m", PACKAGE, "--version"], cwd=installed)
    assert module.stdout == version.stdout
