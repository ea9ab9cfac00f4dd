"""An engine process that cannot go on says why before it ends, also on a machine that is slow to listen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trtllm_disagg.embedded.core_client import REPORTS
from trtllm_disagg.embedded.link import Link, listen
from trtllm_disagg.embedded.messages import Failed

FAIL = """
import sys
from trtllm_disagg.embedded.core_process import CoreProcess, Start
CoreProcess(Start({}, sys.argv[1])).fail("rank 1 died")
"""


def test_the_reason_arrives_although_nobody_listened_at_first(tmp_path: Path) -> None:
    with listen(tmp_path) as listener:
        ended = subprocess.run([sys.executable, "-c", FAIL, str(tmp_path)], check=False, timeout=30)
        link = Link(listener.accept()[0], REPORTS)
    assert ended.returncode == 1
    assert link.receive(wait=True) == [Failed("EngineError", "rank 1 died")]
    link.close()
