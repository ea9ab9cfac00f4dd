"""An engine process that cannot go on says why before it ends, also on a machine that is slow to listen."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

from trtllm_disagg.embedded.messages import Failed, Report

FAIL = """
import sys
from trtllm_disagg.embedded.core_process import CoreProcess, Start
core = CoreProcess(Start({}, sys.argv[1], f"ipc://{sys.argv[1]}/c", f"ipc://{sys.argv[1]}/r"))
print("failing", flush=True)
core.fail("rank 1 died")
"""


def test_the_reason_arrives_although_nobody_listened_at_first(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FAIL, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        with zmq.Context() as context, context.socket(zmq.PULL) as reports:
            reports.bind(f"ipc://{tmp_path}/r")
            assert reports.poll(5000), "not a word"
            report = msgspec.msgpack.decode(reports.recv(), type=Report)
    assert report == Failed("EngineError", "rank 1 died")
    assert process.returncode == 1
