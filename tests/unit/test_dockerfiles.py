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

from dockerfile_parse import DockerfileParser

from tests.support.deployments import ROOT
from trtllm_disagg.cli import COMMANDS, parser_of
from trtllm_disagg.tools.up import up_command

DOCKER = ROOT / "deploy" / "docker"
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


def test_the_build_context_has_only_what_the_dockerfiles_copy() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    sources = {*copied("Dockerfile"), *copied("Dockerfile.cpu")}
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == {"dist/*.whl", *sources}
    assert all((ROOT / source).exists() for source in sources)


def test_the_gpu_image_is_the_tested_dynamo_and_adds_what_its_packages_do_not_bring() -> None:
    (base,), (run,) = values("Dockerfile", "ARG"), values("Dockerfile", "RUN")
    assert base == f"RUNTIME_IMAGE=nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{PINS['ai-dynamo']}"
    missing = set(_requirements("trtllm-disagg")) - _all_requirements("ai-dynamo") - OF_TENSORRT_LLM
    assert "--no-deps" in run
    assert dict(re.findall(r"([\w-]+)==([\w.]+)", run)) == {name: PINS[name] for name in missing}


def test_the_cpu_image_installs_from_what_it_copied(tmp_path: Path) -> None:
    """All modules: a wheel of the copied files has as many as this tree."""
    for source in copied("Dockerfile.cpu"):
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, tmp_path / source, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / source, tmp_path)
    build = (
        sys.executable,
        *["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "."],
    )
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if name.endswith(".py")}
    folders = (ROOT / "trtllm_disagg", ROOT / "handlers")
    assert len(modules) == sum(len(list(folder.rglob("*.py"))) for folder in folders)
    assert "pip install --no-deps --no-build-isolation ." in values("Dockerfile.cpu", "RUN")


def test_the_cpu_image_installs_the_makefiles_requirements_in_its_order() -> None:
    files = re.findall(r"-r (requirements/\w+\.txt)", " ".join(values("Dockerfile.cpu", "RUN")))
    makefile = re.findall(r"-r (requirements/\w+\.txt)", (ROOT / "Makefile").read_text())
    tools = {f"requirements/{name}.txt" for name in ("dev", "docs", "release")}
    assert files == [file for file in makefile if file not in tools]


def test_the_cpu_image_runs_up_as_another_user_than_root(tmp_path: Path) -> None:
    assert json.loads(values("Dockerfile.cpu", "ENTRYPOINT")[0]) == ["trtllm-disagg"]
    command, *flags = json.loads(values("Dockerfile.cpu", "CMD")[0])
    parser = parser_of(command, COMMANDS[command])
    up_command.add_arguments(parser)
    given = parser.parse_args(flags)
    assert (given.http_host, given.http_port) == ("0.0.0.0", 8000)
    assert values("Dockerfile.cpu", "EXPOSE") == ["8000"]
    names = [name for name, _ in instructions("Dockerfile.cpu")]
    assert values("Dockerfile.cpu", "USER") == ["1000"]
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :])
    (check,) = values("Dockerfile.cpu", "HEALTHCHECK")
    _, *words = json.loads(check[check.index("[") :])
    (answer := tmp_path / "health").touch()
    for url, is_healthy in (("http://127.0.0.1:9/health", False), (answer.as_uri(), True)):
        done = subprocess.run([sys.executable, *words], env={"HEALTH_URL": url}, capture_output=True)
        assert (done.returncode == 0) is is_healthy


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
