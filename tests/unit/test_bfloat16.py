"""bfloat16 is close, not exact: how far logits may be apart between schedules, and when a token may differ.

A bfloat16 number has 8 bits of mantissa, so every value is rounded by up to 0.4 %, and sums in another order are
rounded otherwise; four layers of that add up. The tolerance is in standard deviations of a row of logits, and holds
for each of them. A greedy token may differ only where the two best are closer than twice the tolerance; after that
the two answers are of different texts, and are not compared. A router's near-tie takes another expert, which is a
jump: mixtures have a tolerance of their own. Rounding the weights themselves, float32's logits are farther away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.cores import Core
from tests.unit.test_exactness import PROMPTS, Logits, MakeCore, Recorder, recorder
from trtllm_disagg.embedded.model_loader import FAMILIES

__all__ = ["recorder"]

NEW_TOKENS = 6
#: (between two schedules, from float32)
DENSE, MIXTURE = (0.1, 0.15), (0.4, 1.0)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_core(family: str, checkpoints: Checkpoints) -> Iterator[MakeCore]:
    made: list[Core] = []

    def make(**args: Any) -> Core:
        made.append(Core(checkpoints(family), **({"dtype": "bfloat16"} | args)))
        return made[-1]

    yield make
    for core in made:
        core.assert_idle()
        core.close()


def farthest(rows: Logits, expected: Logits, tolerance: float) -> float:
    """In standard deviations, over all that can be compared. Fails for a token that is no near-tie."""
    worst, compared = 0.0, 0
    for prompt, text in enumerate(PROMPTS):
        for position in range(len(text), len(text) + NEW_TOKENS):
            row, wanted = rows[prompt, position].float(), expected[prompt, position].float()
            worst = max(worst, float((row - wanted).abs().max() / wanted.std()))
            compared += 1
            if row.argmax() != wanted.argmax():
                first, second = wanted.topk(2).values
                assert first - second <= 2 * tolerance * wanted.std(), (prompt, position)
                break
    assert compared >= len(PROMPTS) * 2, "nearly all answers went their own ways"
    return worst


def test_schedules_differ_by_no_more_than_the_tolerance(
    family: str, make_core: MakeCore, recorder: Recorder
) -> None:
    tolerance, from_float32 = MIXTURE if family in ("qwen3_moe", "mixtral") else DENSE
    solo = make_core(kv_cache_config={"max_tokens": 256, "enable_block_reuse": False})
    for prompt in PROMPTS:
        solo.generate(prompt, NEW_TOKENS)
    expected = recorder.take()
    assert next(iter(expected.values())).dtype == torch.bfloat16

    exact = make_core(dtype="float32")
    exact.run(*(exact.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
    rounding = farthest(recorder.take(), expected, from_float32)
    made: dict[str, Logits] = {}
    batched = make_core()
    for name in ("batched", "reused"):
        batched.run(*(batched.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
        made[name] = recorder.take()
    transfer = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    chunked = make_core(max_num_tokens=32, enable_chunked_prefill=True, **transfer)
    chunked.run(*(chunked.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
    made["chunked"] = recorder.take()
    decode = make_core(**transfer)
    handoffs = [chunked.prefill(prompt) for prompt in PROMPTS]
    decode.run(*(decode.add_decode(p, h, NEW_TOKENS) for p, h in zip(PROMPTS, handoffs, strict=True)))
    made["disaggregated"] = recorder.take()

    apart = {name: farthest(rows, expected, tolerance) for name, rows in made.items()}
    print(family, {name: round(distance, 4) for name, distance in apart.items()}, rounding)
    assert max(apart.values()) <= tolerance, apart
    assert 0 < rounding <= from_float32, rounding
