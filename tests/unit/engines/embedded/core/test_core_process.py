"""The loop around an engine core: what it waits for, and for how long."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.support.models import EOS, VOCAB
from trtllm_disagg.engines.embedded.core.core_client import REPORTS
from trtllm_disagg.engines.embedded.core.core_process import CoreProcess
from trtllm_disagg.engines.embedded.ipc.messages import (
    AddRequest,
    Failed,
    Ready,
    SamplingSpec,
    Shutdown,
    Start,
    StepReport,
)
from trtllm_disagg.engines.embedded.ipc.sockets import Link, Listener, accept

READY = Ready(
    num_blocks=1,
    tokens_per_block=32,
    vocab_size=VOCAB,
    max_seq_len=32,
    transport="off",
    end_ids=[EOS],
    pids=[1],
)
#: An engine core that never gets on with its first request.
HANG = """
import sys, threading
from tests.unit.engines.embedded.core.test_core_process import IdleCore
from trtllm_disagg.engines.embedded.core.core_process import CoreProcess
from trtllm_disagg.engines.embedded.ipc.messages import Start
core = IdleCore()
core.add = lambda request: threading.Event().wait()
CoreProcess(Start({}, sys.argv[1])).serve(core, 0.2)
"""


class IdleCore:
    """Its only deadline is far away."""

    ready = READY
    has_work = False

    def __init__(self) -> None:
        self.rounds = 0
        self.has_rested = threading.Event()

    def seconds_to_deadline(self) -> float:
        # In the first round the loop waits for a second at most, and then gives memory back.
        self.rounds += 1
        if self.rounds > 1:
            self.has_rested.set()
        return 1e9

    def step(self) -> StepReport:
        return StepReport([])


def test_a_deadline_in_thirty_years_is_waited_for() -> None:
    core = IdleCore()
    address = (listener := Listener("core")).path
    with listener, ThreadPoolExecutor() as threads:
        process = CoreProcess(Start({}, address))
        link = Link(accept(listener), REPORTS)
        served = threads.submit(process.serve, core, None)
        assert core.has_rested.wait(30)
        link.send(Shutdown())
        served.result(timeout=30)
        process.close()
        link.close()


def test_a_request_that_cannot_be_added_in_time_ends_the_process_by_name() -> None:
    address = (listener := Listener("core")).path
    with listener, subprocess.Popen([sys.executable, "-c", HANG, address]) as process:
        link = Link(accept(listener), REPORTS)
        assert link.receive(wait=True) == [READY]
        link.send(AddRequest(1, [5], SamplingSpec(max_tokens=1), "context_and_generation"))
        (failed,) = link.receive(wait=True)
        assert isinstance(failed, Failed)
        assert "has not ended after 0.2 s (embedded.step_timeout_seconds)" in failed.message
        assert process.wait(timeout=30) == 1
        link.close()
