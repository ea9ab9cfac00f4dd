"""An engine process that cannot go on says why before it ends, also on a machine that is slow to listen."""

from __future__ import annotations

import subprocess
import sys

from trtllm_disagg.engines.embedded.core.core_client import REPORTS
from trtllm_disagg.engines.embedded.ipc.messages import Failed
from trtllm_disagg.engines.embedded.ipc.sockets import Link, Listener, accept

FAIL = """
import sys
from trtllm_disagg.engines.embedded.core.core_process import CoreProcess
from trtllm_disagg.engines.embedded.ipc.messages import Start
CoreProcess(Start({}, sys.argv[1])).fail("rank 1 died")
"""


def test_the_reason_arrives_although_it_was_not_accepted_at_first() -> None:
    address = (listener := Listener("core")).path
    with listener:
        ended = subprocess.run([sys.executable, "-c", FAIL, address], check=False, timeout=30)
        link = Link(accept(listener), REPORTS)
    assert ended.returncode == 1
    assert link.receive(wait=True) == [Failed("EngineError", "rank 1 died")]
    link.close()
