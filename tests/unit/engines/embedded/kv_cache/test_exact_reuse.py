"""Float32 is exact for a prefix of any length: KV does not depend on what came after it in the prompt that made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from trtllm_disagg.engines.embedded.core import build as core_module
from trtllm_disagg.engines.embedded.model import sampler

#: One of each kind of attention: plain, with a window, with a softcap, and with transformers' modules around it.
FAMILIES = ["llama", "mistral", "gemma2", "qwen3_moe"]
STEM = [2 + (i * 37 + i * i) % 250 for i in range(96)]
NEW_TOKENS = 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("made_by", "num_shared", "tokens_per_block"),
    [(46, 41, 64), (70, 69, 32), (46, 44, 4), (41, 40, 8), (50, 48, 16)],
)
def test_logits_after_a_reused_prefix_are_those_without_a_cache(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    made_by: int,
    num_shared: int,
    tokens_per_block: int,
) -> None:
    """`made_by`: the length of the prompt that gives the reused KV; it ends in the middle of a tile."""
    wanted = STEM[:num_shared] + [9] * 20
    logits: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for reuse in logits:
        core = Core(
            checkpoints(family),
            kv_cache_config={
                "max_tokens": 512,
                "tokens_per_block": tokens_per_block,
                "enable_block_reuse": reuse,
            },
        )
        # An answer fills the block that its prompt ends in.
        core.generate(STEM[:made_by], 30)
        with monkeypatch.context() as patch:
            patch.setattr(core_module, "sample", recorder(logits[reuse]))
            answer = core.run(core.add(wanted, NEW_TOKENS))
        core.close()
        assert answer.cached_tokens == (num_shared if reuse else 0)
    assert len(logits[True]) == NEW_TOKENS
    assert all(map(torch.equal, logits[True], logits[False]))


def recorder(rows: list[torch.Tensor]) -> Any:
    def record(logits: torch.Tensor, sequences: Sequence[Any]) -> Any:
        rows.append(logits.clone())
        return sampler.sample(logits, sequences)

    return record
