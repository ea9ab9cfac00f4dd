"""Which tokens can be drawn, and how often: as if the whole vocabulary had been sorted, whatever its size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engines.embedded.model.test_sampler import sequence, spec
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.model import sampler as draw_module
from trtllm_disagg.engines.embedded.model.sampler import draw

#: Sorted for top-p, and not.
SMALL, LARGE = 300, 9000
limits = st.builds(
    spec,
    temperature=st.sampled_from([1e-9, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 5, 700, LARGE, LARGE + 5]),
    top_p=st.sampled_from([1e-6, 0.1, 0.8, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
)


def scores_of(rows: int, vocabulary: int, *, ties: bool, seed: int) -> torch.Tensor:
    scores = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    scores[:, ::50] = float("-inf")
    return scores.to(torch.bfloat16).float() if ties else scores


def drawn_by_sorting(scores: torch.Tensor, wanted: SamplingSpec, u: float) -> int:
    """Sort, keep what may be kept, then walk through the vocabulary until the share u of the mass is passed."""
    temperature = max(wanted.temperature, 1e-6)
    probs = torch.softmax((scores.double() - scores.max()) / temperature, -1)
    probs[probs < wanted.min_p * probs.max()] = 0
    probs /= probs.sum()
    order = scores.argsort(descending=True, stable=True)[: wanted.top_k or None]
    before = probs[order].cumsum(0) - probs[order]
    mass = probs[order].sum() if wanted.top_k else 1.0
    order = order[before < max(wanted.top_p, 1e-12) * mass] if wanted.top_p < 1 else order
    kept = torch.zeros_like(probs)
    kept[order] = probs[order]
    total = kept.cumsum(0)
    return int((total <= u * total[-1]).sum())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(limits, min_size=1, max_size=4),
    vocabulary=st.sampled_from([SMALL, LARGE]),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_draw_is_that_of_the_sorted_vocabulary_in_any_batch(
    rows: list[SamplingSpec], vocabulary: int, ties: bool, seed: int
) -> None:
    scores = scores_of(len(rows), vocabulary, ties=ties, seed=seed)
    sequences = [sequence(s, seed=seed + i) for i, s in enumerate(rows)]
    together = draw(scores, sequences)
    assert together == [draw(scores[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    us = [draw_module.uniform(s.seed, len(s.tokens)) for s in sequences]
    wanted = [drawn_by_sorting(row, s, u) for row, s, u in zip(scores, rows, us, strict=True)]
    assert together == wanted


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize("limit", [{"top_k": 7}, {"top_p": 0.02}], ids=repr)
def test_of_equal_logits_the_first_tokens_are_kept(vocabulary: int, limit: dict[str, float]) -> None:
    scores = torch.zeros(1, vocabulary)
    count = 7 if "top_k" in limit else round(0.02 * vocabulary)
    tokens = {draw(scores, [sequence(spec(**limit), seed=i)])[0] for i in range(40)}
    assert max(tokens) < count
    assert len(tokens) > 3


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("limit", [{}, {"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.3}], ids=repr)
def test_draws_at_the_ends_of_the_range_give_possible_tokens(
    u: float, limit: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_module, "uniform", lambda *_: u)
    for seed in range(30):
        scores = scores_of(1, LARGE, ties=False, seed=seed)
        (token,) = draw(scores, [sequence(spec(**limit))])
        assert token == drawn_by_sorting(scores[0], spec(**limit), u)
        assert torch.isfinite(scores[0, token])


def test_top_p_just_below_1_draws_no_impossible_token() -> None:
    for seed in range(30):
        scores = scores_of(1, LARGE, ties=False, seed=seed)
        scores[:, ::50] = -1e3
        (token,) = draw(scores, [sequence(spec(top_p=1.0 - 2.0**-53, temperature=0.1), seed=seed)])
        assert scores[0, token] > -1e3


def test_nan_or_minus_infinity_logits_still_give_a_valid_token() -> None:
    for value in (float("nan"), float("-inf")):
        scores = torch.full((1, LARGE), value)
        for limit in ({}, {"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.3}):
            assert 0 <= draw(scores, [sequence(spec(**limit))])[0] < LARGE
