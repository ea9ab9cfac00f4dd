"""Compiled kernels are run, so they are kept where only this user can write."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from trtllm_disagg.common.interpreter import python
from trtllm_disagg.engines.embedded.cpu_kernels.compiled import kernel_folder
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_kernel_folder_is_beside_the_source_if_writable(tmp_path: Path) -> None:
    folder = kernel_folder("v1", {"HOME": str(tmp_path / "home")}, tmp_path)
    assert folder == tmp_path / "__pycache__" / "kernels" / "v1"
    assert mode(folder) == 0o700
    assert kernel_folder("v1", {}, tmp_path) == folder


def test_numba_cache_dir_wins_over_the_folder_beside_the_source(tmp_path: Path) -> None:
    folder = kernel_folder("v1", {"NUMBA_CACHE_DIR": str(tmp_path / "mine")}, tmp_path)
    assert folder == tmp_path / "mine" / "trtllm-disagg" / "v1"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "{}/home"}, "home/.cache/trtllm-disagg/kernels/v1"),
        ({"HOME": "{}/home", "XDG_CACHE_HOME": "{}/xdg"}, "xdg/trtllm-disagg/kernels/v1"),
    ],
)
def test_an_installation_that_cannot_be_written_to_leaves_the_users_cache(
    tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    (tmp_path / "__pycache__").touch()  # a file: nothing can be made below it, not even by root
    environ = {name: value.format(tmp_path) for name, value in environ.items()}
    assert kernel_folder("v1", environ, tmp_path) == tmp_path / expected


@pytest.mark.parametrize("wrong", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, wrong: int) -> None:
    planted = tmp_path / "__pycache__" / "kernels" / "v1"
    planted.mkdir(parents=True)
    planted.chmod(wrong)
    folder = kernel_folder("v1", {"HOME": str(tmp_path / "home")}, tmp_path)
    assert folder == tmp_path / "home" / ".cache" / "trtllm-disagg" / "kernels" / "v1"


def test_a_link_to_a_folder_elsewhere_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    places = tmp_path / "__pycache__" / "kernels"
    places.mkdir(parents=True)
    (places / "v1").symlink_to(tmp_path / "elsewhere")
    assert kernel_folder("v1", {"HOME": str(tmp_path)}, tmp_path) != places / "v1"


def test_without_any_folder_there_is_none_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "__pycache__").touch()
    assert kernel_folder("v1", {}, tmp_path) is None
    assert "NUMBA_CACHE_DIR can name one" in caplog.text


#: Ends as an engine's process does.
WITHOUT_EXIT_HANDLERS = """
import os
from trtllm_disagg.engines.embedded.cpu_kernels.compiled import compiled, compile_unless_locked
double = compiled()(lambda x: x + x)
assert compile_unless_locked(double, 4)
assert double(4) == 8
os._exit(0)
"""


@pytest.mark.skipif(not this_cpu().compiles, reason="this CPU level compiles nothing")
def test_process_without_a_kernel_folder_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    places = {"NUMBA_CACHE_DIR": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "temporary")}
    subprocess.run(python("-c", WITHOUT_EXIT_HANDLERS), env=os.environ | places, check=True)
    assert list((tmp_path / "temporary").iterdir()) == []
