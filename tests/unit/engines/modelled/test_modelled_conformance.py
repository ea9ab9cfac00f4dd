"""The modelled engine has the LLM API of the others: the conformance suite, where requests and tokens are concerned."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.deployments import ROOT

pytestmark = pytest.mark.process

SUITE = [f"tests/conformance/test_{name}.py" for name in ("answers", "generate_async", "handoffs")]
_MAX_SECONDS = 280


def test_the_modelled_engine_conforms() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *SUITE],
        cwd=ROOT,
        env=os.environ | {"TRTLLM_DISAGG_CONFORMANCE": "trtllm_disagg.engines.modelled"},
        capture_output=True,
        text=True,
        timeout=_MAX_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
