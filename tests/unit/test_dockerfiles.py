"""deploy/docker/ as far as it can be known without building: `make lint` runs hadolint on both files."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

from tests.support.deployments import ROOT
from trtllm_disagg.common.cli import COMMANDS, parser_of
from trtllm_disagg.tools.up import up_command

DOCKER = ROOT / "deploy" / "docker"
BOTH = ("Dockerfile", "Dockerfile.cpu")
PINS = {
    name: version
    for file in ("base.txt", "dynamo.txt")
    for name, _, version in (
        line.partition("==") for line in (ROOT / "requirements" / file).read_text().splitlines()
    )
    if version
}
#: Of a worker's requirements that ai-dynamo does not bring: TensorRT-LLM requires psutil itself.
OF_TENSORRT_LLM = {"psutil"}


def instructions(file: str) -> list[tuple[str, str]]:
    with (DOCKER / file).open("rb") as opened:
        parsed: list[dict[str, Any]] = DockerfileParser(fileobj=opened).structure
    return [(line["instruction"], line["value"]) for line in parsed if line["instruction"] != "COMMENT"]


def values(file: str, instruction: str) -> list[str]:
    return [value for name, value in instructions(file) if name == instruction]


def copied(file: str) -> list[str]:
    """From the build context."""
    words = [shlex.split(value) for value in values(file, "COPY")]
    return [source for each in words if not each[0].startswith("--from") for source in each[:-1]]


@pytest.mark.parametrize("file", BOTH)
def test_files_copied_by_dockerfiles_exist_and_are_not_ignored(file: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied(file)
    for source in copied(file):
        assert (ROOT / source).exists(), source
        assert source in sent, f"{source} is not in .dockerignore's list of what is sent"


def test_the_gpu_image_is_that_of_the_dynamo_that_is_tested() -> None:
    (base,) = values("Dockerfile", "ARG")
    assert base == f"RUNTIME_IMAGE=nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{PINS['ai-dynamo']}"


def test_the_gpu_image_adds_what_its_packages_do_not_bring() -> None:
    (run,) = values("Dockerfile", "RUN")
    asked = set(_requirements("trtllm-disagg"))
    missing = asked - _all_requirements("ai-dynamo") - OF_TENSORRT_LLM
    assert "--no-deps" in run
    added = dict(re.findall(r"([\w-]+)==([\w.]+)", run))
    assert added == {name: PINS[name] for name in missing}


def test_the_cpu_image_installs_from_what_it_copied(tmp_path: Path) -> None:
    """All modules: a wheel of the copied files has as many as this tree."""
    for source in copied("Dockerfile.cpu"):
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / source, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / source, tmp_path)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        ".",
    ]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if name.endswith(".py")}
    folders = (ROOT / "trtllm_disagg", ROOT / "handlers")
    assert len(modules) == sum(len(list(folder.rglob("*.py"))) for folder in folders)
    assert "pip install --no-deps --no-build-isolation ." in values("Dockerfile.cpu", "RUN")


def test_the_cpu_images_command_is_one_that_up_takes() -> None:
    assert json.loads(values("Dockerfile.cpu", "ENTRYPOINT")[0]) == ["trtllm-disagg"]
    command, *flags = json.loads(values("Dockerfile.cpu", "CMD")[0])
    parser = parser_of(command, COMMANDS[command])
    up_command.add_arguments(parser)
    given = parser.parse_args(flags)
    assert (given.http_host, given.http_port) == ("0.0.0.0", 8000)
    assert values("Dockerfile.cpu", "EXPOSE") == ["8000"]


def test_the_gpu_image_is_filled_by_root_and_runs_as_its_own_user() -> None:
    """The base's environment is root's; as root, `LLM()` fails on Open MPI 5."""
    names = [name if name != "USER" else f"USER {value}" for name, value in instructions("Dockerfile")]
    assert names[1:] == ["FROM", "USER root", "RUN", "COPY", "COPY", "USER dynamo"]


def test_the_cpu_image_does_not_run_as_root() -> None:
    last = instructions("Dockerfile.cpu")
    after_the_user = last[next(i for i, (name, _) in enumerate(last) if name == "USER") :]
    assert after_the_user[0] == ("USER", "1000")
    assert not {"RUN", "COPY"} & {name for name, _ in after_the_user}


def test_the_cpu_images_health_check_fails_where_nothing_answers(tmp_path: Path) -> None:
    (check,) = values("Dockerfile.cpu", "HEALTHCHECK")
    python, *words = json.loads(check[check.index("[") :])
    assert python == "python"
    done = subprocess.run([sys.executable, *words], env={"HEALTH_URL": "http://127.0.0.1:9/health"})
    assert done.returncode != 0
    answer = tmp_path / "health"
    answer.touch()
    done = subprocess.run([sys.executable, *words], env={"HEALTH_URL": answer.as_uri()})
    assert done.returncode == 0


def _requirements(distribution: str) -> list[str]:
    """Without extras."""
    lines = [line for line in metadata.requires(distribution) or [] if "extra ==" not in line]
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines]


def _all_requirements(distribution: str) -> set[str]:
    """Also of its requirements."""
    found: set[str] = set()
    todo = [distribution]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            try:
                todo += _requirements(name)
            except metadata.PackageNotFoundError:
                continue
    return found
