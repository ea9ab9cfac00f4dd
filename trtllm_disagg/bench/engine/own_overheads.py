"""What a step costs beside the model: the embedded engine's core with clocks in it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
import zmq

from trtllm_disagg.bench.engine.own_engine import OwnEngine
from trtllm_disagg.embedded import core_process
from trtllm_disagg.embedded.messages import StepReport
from trtllm_disagg.embedded.scheduler import Row


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
    """To encode and send each report, and to ask for commands: what core_process.py does between two steps."""
    with tempfile.TemporaryDirectory(prefix="trtllm-disagg-") as directory:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        commands, incoming = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        commands.bind(f"ipc://{directory}/commands")
        incoming.bind(f"ipc://{directory}/reports")
        process = core_process.CoreProcess(
            core_process.Start({}, directory, f"ipc://{directory}/commands", f"ipc://{directory}/reports")
        )
        reader = threading.Thread(target=lambda: [incoming.recv() for _ in reports])
        reader.start()
        seconds = []
        for report in reports:
            started = time.perf_counter()
            process.report(report)
            process._receive(0.0)
            seconds.append(time.perf_counter() - started)
        reader.join()
        process.close()
        context.destroy(linger=0)
    return seconds
