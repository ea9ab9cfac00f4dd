"""What a step costs beside the model: the embedded engine's core with clocks in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch

from trtllm_disagg.bench.engine.own_engine import OwnEngine
from trtllm_disagg.embedded.core import process as core_process
from trtllm_disagg.embedded.core.client import REPORTS
from trtllm_disagg.embedded.ipc.link import Link, accept, listen
from trtllm_disagg.embedded.ipc.messages import Report, StepReport
from trtllm_disagg.embedded.scheduler.scheduler import Row


class _TimedRunner:
    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.seconds = 0.0

    def run(self, rows: Seq[Row]) -> torch.Tensor:
        started = time.perf_counter()
        logits: torch.Tensor = self._runner.run(rows)
        self.seconds = time.perf_counter() - started
        return logits


class OwnOverheads(OwnEngine):
    def split(self, prompts: list[list[int]], steps: int) -> dict[str, list[float]]:
        """Seconds of each decode step: all of it, the forward, and what the report costs the process."""
        core: Any = self.core
        runner = core._runner = _TimedRunner(core._runner)
        whole, forward, reports = [], [], []
        try:
            with self._decoding(prompts, steps):
                for _ in range(steps):
                    seconds, report = self._step()
                    whole.append(seconds)
                    forward.append(runner.seconds)
                    reports.append(report)
        finally:
            core._runner = runner._runner
        return {"step": whole, "forward": forward, "ipc": _ipc_seconds(reports)}


def _ipc_seconds(reports: Seq[StepReport]) -> list[float]:
    """To encode and send each report, and to ask for commands: what process.py does between two steps."""
    listener, address = listen()
    with listener:
        process = core_process.CoreProcess(core_process.Start({}, address))
        incoming = Link(accept(listener), REPORTS)
    reader = threading.Thread(target=lambda: _read_all(incoming))
    reader.start()
    seconds = []
    for report in reports:
        started = time.perf_counter()
        process.report(report)
        process._receive(0.0)
        seconds.append(time.perf_counter() - started)
    process.close()
    reader.join()
    incoming.close()
    return seconds


def _read_all(incoming: Link[Report]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            incoming.receive(wait=True)
