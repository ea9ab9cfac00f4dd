"""What needed a second try is named, and five are enough."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import deployments
from tests.support.deployments import Fleet
from tests.support.second_try import MOST
from trtllm_disagg.tools.up.plan import DeploymentConfig

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist"}
SUITE = """
import pathlib, pytest

def fails_once(name):
    tried = pathlib.Path(name)
    if not tried.exists():
        tried.touch()
        raise OSError(f"first try of {name}")

@pytest.fixture(scope="module")
def deployment():
    fails_once("deployment")
    yield

@pytest.fixture
def own():
    fails_once("own")

def test_of_a_shared_fixture(deployment): pass
def test_of_its_own_fixture(own): pass

@pytest.mark.parametrize("number", range(%d))
def test_fails_once(number):
    fails_once(str(number))
"""


def run(directory: Path, num_flaky: int, *arguments: str, more: str = "") -> tuple[int, str]:
    (directory / "conftest.py").write_text("pytest_plugins = ['tests.support.second_try']")
    (directory / "pytest.ini").write_text("[pytest]")
    (directory / "test_it.py").write_text(SUITE % num_flaky + more)
    command = (sys.executable, "-m", "pytest", "--second-try", *arguments)
    environment = os.environ | PLUGINS | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_what_needed_a_second_try_is_named_and_passes(tmp_path: Path) -> None:
    code, output = run(tmp_path, MOST - 2, "-n", "2")
    assert code == 0, output
    named = output.partition(f"\n{MOST} needed a second try, of at most {MOST}:\n")[2]
    first, *tests = named.splitlines()[:MOST]
    assert first == "  fixture deployment of test_it.py, after OSError: first try of deployment"
    flaky = (f"test_fails_once[{number}]" for number in range(MOST - 2))
    assert set(tests) == {f"  test_it.py::{name}" for name in ("test_of_its_own_fixture", *flaky)}
    assert "all of it passed then" in output
    # A run in which nothing fails names nothing, also by --last-failed.
    code, output = run(tmp_path, MOST - 2, "-n", "0", "--last-failed")
    assert (code, "second try" in output) == (0, False)


def test_more_than_five_fail_the_run_though_all_pass_then(tmp_path: Path) -> None:
    code, output = run(tmp_path, MOST - 1, "-n", "0")
    assert code == 1
    assert f"\n{MOST + 1} needed a second try, of at most {MOST}:" in output
    assert "all of it passed then" in output


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, 0, "-n", "0", more="def test_fails(): assert 1 > 2")
    assert code == 1
    assert "3 needed a second try" in output
    assert "passed then" not in output


def test_a_deployment_of_the_fleet_is_tried_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Any = "served"
    tries = {"agg": [OSError("full"), answers], "decode_first": [OSError("full"), OSError("still full")]}
    directories: list[str] = []
    noted: list[str] = []

    @contextmanager
    def served(config: DeploymentConfig) -> Iterator[str]:
        directories.append(config.run_dir.name)
        if isinstance(outcome := tries[config.strategy].pop(0), OSError):
            raise outcome
        yield outcome

    monkeypatch.setattr(deployments, "served", served)
    fleet = Fleet(tmp_path, tries, lambda name, error: noted.append(f"{name}: {error}"))
    with closing(fleet):
        assert fleet["agg"] == answers
        with pytest.raises(OSError, match="still full"):
            fleet["decode_first"]
    assert sorted(noted) == ["the shared agg: full", "the shared decode_first: full"]
    assert sorted(directories) == ["agg", "agg-again", "decode_first", "decode_first-again"]
