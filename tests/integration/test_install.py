"""The wheel beside TensorRT-LLM: an environment without torch and transformers, with a module `tensorrt_llm`.

TensorRT-LLM pins both, so the worker may neither bring nor need them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support import mounted_recording
from tests.support.dynamo_deployment import COMPLETIONS, DynamoDeployment
from tests.support.models import write_checkpoint

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "*.log", "tests")
MODEL = "tiny"
#: TensorRT-LLM brings or pins them, or they belong to the embedded engine.
FORBIDDEN = (
    "torch",
    "transformers",
    "numba",
    "numpy",
    "tokenizers",
    "safetensors",
    "llguidance",
    "cryptography",
)
#: Of ai-dynamo's requirements: for its frontend and its simulator, not for a worker.
NOT_FOR_WORKERS = {"transformers", "aisimulate", "kubernetes", "redis", "zstandard", "certifi"}

#: Puts the recording LLM in its own place.
STAND_IN = f"""{Path(mounted_recording.__file__).read_text()}
import atexit
_mounted = mounted_recording_llm()
_mounted.__enter__()
atexit.register(_mounted.__exit__, None, None, None)
"""


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def requirements(distribution: str) -> set[str]:
    """Of one that is installed, without extras, and theirs; only those that are installed here."""
    found: set[str] = set()
    todo = [distribution]
    while todo:
        name = todo.pop()
        if name in found or name in NOT_FOR_WORKERS:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += _names(requires)
    return found


def _names(requires: list[str]) -> list[str]:
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requires if "extra ==" not in line]


def wheel_requirements(wheel: Path) -> list[str]:
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return _names(
        [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    )


def link(distribution: str, site_packages: Path) -> None:
    """As if it were installed: every file and folder that it has at the top, nothing is copied or downloaded."""
    here = Path(sysconfig.get_paths()["purelib"])
    files = metadata.files(distribution) or []
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        if (here / top).exists() and not (site_packages / top).exists():
            (site_packages / top).symlink_to(here / top)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    source, out = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment: the wheel, what the wheel asks for, Dynamo, and a tensorrt_llm."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    wanted = {*wheel_requirements(wheel), "ai-dynamo", "ai-dynamo-runtime"}
    for distribution in sorted(set().union(*map(requirements, wanted))):
        link(distribution, site_packages)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", wheel)
    (site_packages / "tensorrt_llm").mkdir()
    (site_packages / "tensorrt_llm" / "__init__.py").write_text(STAND_IN)
    return python


@pytest.fixture(scope="module")
def deployment(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoDeployment]:
    """The frontend has an environment of its own, as it may have an image of its own."""
    directory = tmp_path_factory.mktemp("deployment")
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    deployment = DynamoDeployment(directory)
    worker = ["trtllm_disagg", "worker", "--model", str(model), "--served-model-name", MODEL]
    try:
        deployment.start_frontend()
        deployment.start_workers({"agg": [*worker, "--disaggregation-mode", "agg"]}, python=str(python))
        deployment.wait_ready(completion())
        yield deployment
    finally:
        deployment.stop()


def completion() -> dict[str, Any]:
    extra = {"extra_fields": ["completion_token_ids"]}
    return {"model": MODEL, "prompt": list(range(2, 34)), "max_tokens": 5, "nvext": extra}


@pytest.fixture(autouse=True)
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.parametrize("module", FORBIDDEN)
def test_the_environment_has_nothing_of_the_embedded_engine(python: Path, module: str) -> None:
    assert run(python, "-c", f"import importlib.util as u; print(u.find_spec('{module}'))") == "None\n"


def test_a_worker_from_the_wheel_serves_on_tensorrt_llm(deployment: DynamoDeployment) -> None:
    answer = deployment.post_ok(COMPLETIONS, completion())
    assert len(answer["nvext"]["completion_token_ids"]) == 5
    assert "on the tensorrt_llm engine as agg" in deployment.log("agg")


def test_demo_model_without_its_packages_names_the_extra_to_install(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-m", "trtllm_disagg", "demo-model", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 2
    assert "pip install 'trtllm-disagg[embedded]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_that_is_not_installed_is_refused_with_the_extra_to_install(
    python: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model")
    command = [str(python), "-m", "trtllm_disagg", "worker", "--model", str(model), "--engine", "embedded"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 2
    assert "--engine: 'embedded' is not allowed" in done.stderr
    assert "pip install 'trtllm-disagg[embedded]'" in done.stderr
