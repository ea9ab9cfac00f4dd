"""Kernels that are compiled before the first engine starts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.interpreter import python
from trtllm_disagg.engines.embedded.core.precompile import main
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu

if not this_cpu().compiles:
    pytest.skip("this CPU level compiles nothing", allow_module_level=True)

#: Stands in for Python: the process for bfloat16 is killed, as by a kernel without memory left.
KILLED = """#!/bin/sh
case "$*" in *bfloat16*) kill -9 $$ ;; esac
"""
#: Prints for how many types of arguments there is a kernel of the threads beside the first one.
OF_OTHER_THREADS = """
from trtllm_disagg.engines.embedded.core.precompile import precompile
from trtllm_disagg.engines.embedded.cpu_kernels.decode_step import serve
precompile("float32")
print(len(serve.signatures))
"""
TERMINATED = """
import signal
from trtllm_disagg.engines.embedded.core import precompile
precompile.build_core = lambda *_, **__: signal.raise_signal(signal.SIGTERM)
precompile.precompile("float32")
"""


def test_precompile_whose_process_was_killed_does_not_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "python"
    killed.write_text(KILLED)
    killed.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(killed))
    assert main(["float32"] * 2) == 0
    assert main(["float32", "bfloat16"]) == 9


def test_precompile_compiles_what_an_engine_with_several_threads_needs() -> None:
    ran = subprocess.run(python("-c", OF_OTHER_THREADS), capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1"]


def test_precompile_that_is_terminated_leaves_no_directory(tmp_path: Path) -> None:
    ran = subprocess.run(python("-c", TERMINATED), env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert ran.returncode == ExitCode.TERMINATED
    assert list(tmp_path.glob("trtllm-disagg-*")) == []
