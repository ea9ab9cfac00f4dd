"""What a step waits for on a GPU, which computes behind the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtllm_disagg.engines.embedded.core.build import SamplingModel
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, SamplingSpec
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence


class Runner:
    """Returns when the step is launched, as a model on a GPU does."""

    def run(self, rows: Any) -> Any:
        return SimpleNamespace(is_cuda=True, device="cuda:0")

    def close(self) -> None:
        """Nothing to close."""


def test_a_step_that_draws_nothing_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """generation_first moves the KV of a prompt's middle right after its step, by another thread."""
    waits: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    request = AddRequest(1, list(range(20, 60)), SamplingSpec(max_tokens=4), "context_only")
    sequence = Sequence.from_request(request, 0, None)
    sequence.blocks = [7, 3]
    assert SamplingModel(Runner()).run([Row.of(sequence, 16)]) == []
    assert waits == ["waited"]
