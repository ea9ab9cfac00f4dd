"""A decode step in one call: the bits of the step in many calls, with one thread and with two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.models import write_checkpoint
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.model.attention import StepLayout
from trtllm_disagg.engines.embedded.model.compiled_ops import FusedDecode
from trtllm_disagg.engines.embedded.model.forward import PlainForward

PROMPTS = [[2 + (i * 37) % 200 for i in range(n)] for n in (1, 3, 17, 31, 32, 33, 70)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


#: (dtype, embedded.weights): a bfloat16 model as this CPU level computes it, and in float32.
KINDS = [
    ("float32", "auto"),
    ("bfloat16", "auto"),
    *([("bfloat16", "float32")] if this_cpu().has_bfloat16 else []),
]


class Both:
    """The fused decode of a forward, which is compared with the unfused one at each step."""

    def __init__(self, forward: PlainForward) -> None:
        assert forward.fused is not None
        self.compared: list[int] = []
        self._forward, self._fused = forward, forward.fused
        forward.fused = cast(FusedDecode, self)

    def __call__(self, tokens: list[int], layout: StepLayout) -> torch.Tensor:
        fused = self._fused(tokens, layout).clone()
        self._forward.fused = None
        unfused = self._forward(tokens, layout)
        self._forward.fused = cast(FusedDecode, self)
        assert torch.equal(fused, unfused.float())
        self.compared.append(len(tokens))
        return fused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fused, name)


@pytest.mark.parametrize(("dtype", "weights"), KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_step_has_the_bits_of_the_unfused_one(
    family: str, dtype: str, weights: str, threads: int, checkpoints: Checkpoints
) -> None:
    core = Core(checkpoints(family), dtype=dtype, embedded={"weights": weights})
    model: Any = core.engine.model
    both = Both(model.runner.forward)
    core.run(*[core.add(prompt, 6) for prompt in PROMPTS])
    core.close()
    assert max(both.compared) == len(PROMPTS)


def test_a_model_that_does_not_fill_whole_panels_is_served_by_many_calls_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    core = Core(write_checkpoint(tmp_path, "llama", intermediate_size=160))
    model: Any = core.engine.model
    assert model.runner.forward.fused is None
    assert "weight with 64 outputs and 160 inputs: not a multiple of 64" in caplog.text
    core.close()


def test_closing_the_core_ends_the_threads_of_the_fused_decode(
    checkpoints: Checkpoints, threads: int
) -> None:
    core = Core(checkpoints("llama"))
    model: Any = core.engine.model
    runner = model.runner
    others = runner.forward.fused.threads
    assert len(others) == threads - 1
    core.close()
    assert not any(thread.is_alive() for thread in others)
