"""What a contributor and a release rely on: the version, `make release`, hooks, CI."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from scripts import release
from trtllm_disagg import __version__

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
#: Of each release: (version, what stands in brackets).
RELEASES = re.findall(r"^## (\d[\d.]*) \((.*)\)$", CHANGELOG, re.MULTILINE)


def git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout


def test_main_is_a_development_version_after_the_last_release_while_changes_are_unreleased() -> None:
    newest = Version(RELEASES[0][0])
    assert Version(__version__).is_devrelease is ("\n## Unreleased\n" in CHANGELOG)
    assert Version(__version__) >= newest


def test_the_changelog_names_the_commit_of_each_release_before_this_version() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    if git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("a clone without its history")
    for version, brackets in RELEASES:
        if version != __version__:
            commit = re.fullmatch(r"\d{4}-\d\d-\d\d, ([0-9a-f]{8,40})", brackets)
            assert commit, brackets
            assert f'"{version}"' in git(ROOT, "show", f"{commit[1]}:trtllm_disagg/__init__.py")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which is ready to be 1.2.3."""
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2030-01-02)\n\n- It works.\n")
    # Without hooks and signatures of the user that runs the tests.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "__version__", "1.2.3")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def commit(checkout: Path) -> None:
    git(checkout, "add", ".")
    git(checkout, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "Release")


def test_a_clean_commit_with_its_entry_may_be_released_and_gets_a_tag(checkout: Path) -> None:
    release.require_releasable("1.2.3")
    command = release.tag_command("1.2.3")
    head = git(checkout, "rev-parse", "--short", "HEAD").strip()
    assert command == f"git tag -a v1.2.3 -m 'trtllm-disagg 1.2.3' {head}"


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("", r"VERSION: '' is not allowed; expected x\.y\.z"),
        ("1.2.3.dev0", r"VERSION: '1\.2\.3\.dev0' is not allowed"),
        ("1.2.4", r"no entry '## 1\.2\.4 \(YYYY-MM-DD\)'"),
        ("1.2", "is not allowed"),
    ],
)
def test_a_version_without_its_changelog_entry_is_not_released(
    checkout: Path, version: str, error: str
) -> None:
    with pytest.raises(SystemExit, match=error):
        release.require_releasable(version)


def test_a_version_that_the_code_does_not_have_is_not_released(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "__version__", "1.2.3.dev0")
    with pytest.raises(SystemExit, match=r"says '1\.2\.3\.dev0'; commit '1\.2\.3' there first"):
        release.require_releasable("1.2.3")


@pytest.mark.parametrize("name", ["new.txt", "CHANGELOG.md"])
def test_a_tree_with_changes_is_not_released(checkout: Path, name: str) -> None:
    with (checkout / name).open("a") as file:
        file.write("more\n")
    with pytest.raises(SystemExit, match="changes that are not committed"):
        release.require_releasable("1.2.3")
    commit(checkout)
    release.require_releasable("1.2.3")


def test_pre_commit_runs_each_part_of_make_lint() -> None:
    (parts,) = re.findall(r"^lint: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    hooks = loaded(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == parts.split()
    assert [hook["entry"] for hook in hooks] == [f"make -s {part}" for part in parts.split()]
    assert not any(hook["pass_filenames"] for hook in hooks), "each checks all files, as `make lint` does"


def loaded(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())
