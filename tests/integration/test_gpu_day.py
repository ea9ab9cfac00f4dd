"""The day with GPUs on the recording engine, in real deployments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_day import FAIL, PASS
from scripts.gpu_site import RECORDING
from tests.support.deployments import ROOT, demo_model

pytestmark = pytest.mark.process


def test_the_command_prints_a_line_for_each_check_and_leaves_one_file_to_paste(tmp_path: Path) -> None:
    out, asked = tmp_path / "day.txt", ["--model", str(demo_model()), "--engine", RECORDING]
    command = [sys.executable, "-m", "scripts.gpu_day", *asked, "--only", "first: t", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    lines = [line for line in out.read_text().splitlines() if line.startswith((PASS, FAIL))]
    assert [line for line in lines if "speed" not in line and line.startswith(FAIL)] == []
    for name in (
        "agg: the same answer twice",
        "prefill_first: tokens as agg's",
        "decode_first: tokens as agg's",
    ):
        assert any(name in line and "4 of 4 equal" in line for line in lines), done.stdout
    assert "trtllm_disagg" in out.read_text().partition("\n\n")[2]
