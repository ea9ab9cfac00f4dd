"""The tests of Dynamo's own worker, as its wheel brings them, on the embedded engine in TensorRT-LLM's place."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Their files that say nothing about an engine for text and images.
OTHER_FILES = {
    "multimodal/test_trtllm_cuda_ipc.py": "encode workers",
    "multimodal/test_trtllm_embedding_fetcher.py": "encode workers",
    "test_trtllm_multimodal_encoder.py": "encode workers",
    "test_trtllm_image_diffusion.py": "diffusion",
    "test_trtllm_video_diffusion.py": "diffusion",
    "test_video_encode_real.py": "diffusion",
    "test_trtllm_sleep_wake_handlers.py": "GPU memory service",
    "test_trtllm_snapshot.py": "snapshots",
}


@pytest.fixture(scope="module")
def dynamos() -> Path:
    found = importlib.util.find_spec("dynamo")
    for place in (found and found.submodule_search_locations) or ():
        if (tests := Path(place) / "trtllm" / "tests").is_dir():
            return tests
    pytest.skip("ai-dynamo is not installed, or without its tests")


def test_every_file_that_is_left_out_exists(dynamos: Path) -> None:
    assert [name for name in OTHER_FILES if not (dynamos / name).is_file()] == []


def test_dynamos_worker_passes_its_own_tests_on_the_embedded_engine(dynamos: Path) -> None:
    files = [str(path) for path in sorted(dynamos.rglob("test_*.py"))]
    left_out = {str(dynamos / name) for name in OTHER_FILES}
    told = ["-q", "-n", "0", "-c", os.devnull, "--rootdir", str(dynamos), "-W", "ignore", "--tb", "short"]
    told += ["-p", "no:cacheprovider", "-p", "tests.support.dynamo_tests", "-o", "asyncio_mode=auto"]
    told += ["--import-mode", "importlib", "--timeout", "120", *sorted(set(files) - left_out)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.mount", "-m", "pytest", *told],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    *_, last = done.stdout.strip().splitlines() or [""]
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    # None has skipped itself, and only those that are named were left out.
    assert re.fullmatch(r"\d{3,} passed, 5 deselected in .*", last), last
