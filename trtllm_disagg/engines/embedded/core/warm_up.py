"""The steps of an engine before its first request."""

from __future__ import annotations

from pathlib import Path

import torch

from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence
from trtllm_disagg.engines.embedded.tensor_parallel.team import Runner
from trtllm_disagg.errors import ConfigError

#: A prompt of one token, and one more token.
_POSITIONS = 2


def warm_up(runner: Runner, model: Path, num_blocks: int, tokens_per_block: int) -> None:
    """A prefill, a decode, and both in one step, in blocks that are free yet. They prove that the weights give numbers,
    and have every kernel compiled and loaded (seconds once on a machine, a tenth of one later) before a request waits
    for it. Raises ConfigError for a model that gives something else than finite numbers.
    """
    each = -(-_POSITIONS // tokens_per_block)
    first, second = (_sequence(range(i * each, (i + 1) * each)) for i in range(2))
    steps = [[first], [first], [first, second]] if num_blocks >= 2 * each else [[first]]
    for sequences in steps:
        logits = runner.run([Row.of(sequence, 1) for sequence in sequences])
        if not torch.isfinite(logits).all():
            raise ConfigError(
                f"model: {model} gives logits that are not finite numbers; its weights are damaged, or too large for "
                'its dtype (try --override-engine-args \'{"dtype": "float32"}\')'
            )
        first.tokens, first.num_computed = [0, 0], 1


def _sequence(blocks: range) -> Sequence:
    return Sequence(
        request_id=0,
        index=0,
        request_type="context_and_generation",
        tokens=[0],
        num_prompt=1,
        sampling=SamplingSpec(max_tokens=_POSITIONS),
        seed=0,
        blocks=list(blocks),
    )
