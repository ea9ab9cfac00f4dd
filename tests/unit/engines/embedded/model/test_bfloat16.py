"""bfloat16 is close, not exact: how far logits may be apart between schedules, and when a token may differ.

A bfloat16 number has 8 bits of mantissa, so every value is rounded by up to 0.4 %, and sums in another order are
rounded otherwise; four layers of that add up. The tolerance is in standard deviations of a row of logits, and holds
for each of them. A greedy token may differ only where the two best are closer than twice the tolerance; after that
the two answers are of different texts, and are not compared. A router's near-tie takes another expert, which is a
jump: mixtures have a tolerance of their own. Rounding the weights themselves, float32's logits are farther away.

Where bfloat16 is only how weights and KV are stored, and float32 what is computed in, nothing differs at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.ranks import Logits, MakeCore, Recorder
from tests.unit.engines.embedded.model.test_exactness import PROMPTS, recorder
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import this_cpu
from trtllm_disagg.engines.embedded.params.model_config import FAMILIES
from trtllm_disagg.errors import ConfigError

__all__ = ["recorder"]

NEW_TOKENS = 6
#: (between two schedules, from float32)
DENSE, MIXTURE = (0.1, 0.15), (0.4, 1.0)


#: As a CPU's level has it, for every family; and the other way, for the plain forward, soft-caps and experts.
WAYS = [(family, "auto") for family in FAMILIES]
OTHER = "float32" if this_cpu().has_bfloat16 else "bfloat16"
WAYS += [(family, OTHER) for family in ("llama", "gemma2", "qwen3_moe")]


def computed_in(weights: str) -> torch.dtype:
    return torch.bfloat16 if weights != "float32" and this_cpu().has_bfloat16 else torch.float32


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, weights = request.param
    return family, weights


@pytest.fixture
def family(way: tuple[str, str]) -> str:
    return way[0]


@pytest.fixture
def make_core(way: tuple[str, str], checkpoints: Checkpoints) -> Iterator[MakeCore]:
    made: list[Core] = []
    family, weights = way

    def make(**args: Any) -> Core:
        given = {"dtype": "bfloat16", "embedded": {"weights": weights}} | args
        made.append(Core(checkpoints(family), **given))
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
    way: tuple[str, str], make_core: MakeCore, recorder: Recorder
) -> None:
    family, weights = way
    tolerance, from_float32 = MIXTURE if family in ("qwen3_moe", "mixtral") else DENSE
    solo = make_core(kv_cache_config={"max_tokens": 256, "enable_block_reuse": False})
    for prompt in PROMPTS:
        solo.generate(prompt, NEW_TOKENS)
    expected = recorder.take()
    assert next(iter(expected.values())).dtype == computed_in(weights)

    exact = make_core(dtype="float32", embedded={})
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
    print(way, {name: round(distance, 4) for name, distance in apart.items()}, rounding)
    assert max(apart.values()) <= (tolerance if computed_in(weights) == torch.bfloat16 else 0), apart
    assert 0 < rounding <= from_float32, rounding


@pytest.mark.parametrize(
    "kinds", [("auto", "float32"), ("float32", "auto"), ("float32", "bfloat16")], ids="-".join
)
def test_handoff_between_bfloat16_and_float32_weights_gives_tolerable_logits(
    kinds: tuple[str, str], checkpoints: Checkpoints, recorder: Recorder
) -> None:
    """The KV of a bfloat16 model is bfloat16, whatever computes it: a worker with bfloat16 products and one without
    serve one deployment.
    """
    args: dict[str, Any] = {"dtype": "bfloat16", "cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    prefill, decode = (Core(checkpoints(), embedded={"weights": weights}, **args) for weights in kinds)
    decode.run(*(decode.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
    expected = recorder.take()
    assert decode.engine.ready.is_exact == (computed_in(kinds[1]) == torch.float32)
    fresh = Core(checkpoints(), embedded={"weights": kinds[1]}, **args)
    handoffs = [prefill.prefill(prompt) for prompt in PROMPTS]
    fresh.run(*(fresh.add_decode(p, h, NEW_TOKENS) for p, h in zip(PROMPTS, handoffs, strict=True)))
    assert farthest(recorder.take(), expected, DENSE[0]) <= DENSE[0]
    for core in (prefill, decode, fresh):
        core.assert_idle()
        core.close()


def test_a_float32_model_has_no_bfloat16_weights_to_keep(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match=r"embedded\.weights: 'bfloat16' .* auto or float32"):
        Core(checkpoints(), dtype="float32", embedded={"weights": "bfloat16"})
