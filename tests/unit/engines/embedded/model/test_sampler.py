"""From logits to tokens: repeatable, distributed as asked, with the logprobs of the model."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.model.sampler import sample, uniform
from trtllm_disagg.engines.embedded.scheduler.sequence import Sequence

VOCAB = 24
DRAWS = 6000


def sequence(
    spec: SamplingSpec, *, seed: int = 0, prompt: list[int] | None = None, output: int | list[int] = 0
) -> Sequence:
    answer = [3] * output if isinstance(output, int) else output
    tokens = prompt or [1, 2]
    return Sequence(
        request_id=1,
        index=0,
        request_type="context_and_generation",
        tokens=tokens + answer,
        num_prompt=len(tokens),
        sampling=spec,
        seed=seed,
    )


def spec(**more: Any) -> SamplingSpec:
    return SamplingSpec(max_tokens=100, **({"greedy": False} | more))


def logits_of(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def one(logits: torch.Tensor, s: Sequence) -> int:
    (sampled,) = sample(logits, [s])
    assert sampled.token is not None
    return sampled.token


# -- a draw depends on (seed, position) and the logits only


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20))
def test_a_draw_is_a_number_below_one_that_every_part_of_its_key_changes(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0.0 <= u < 1.0
    assert u == uniform(seed, position)
    assert len({u, uniform(seed ^ 1, position), uniform(seed, position + 1)}) == 3


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            spec,
            greedy=st.booleans(),
            temperature=st.sampled_from([1e-9, 0.3, 1.0, 2.5]),
            top_k=st.sampled_from([0, 1, 5, 1000]),
            top_p=st.sampled_from([0.1, 0.8, 1.0]),
            min_p=st.sampled_from([0.0, 0.2]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            presence_penalty=st.sampled_from([0.0, 0.5]),
            min_tokens=st.integers(0, 3),
            end_ids=st.sampled_from([(), (4,)]),
            bad_token_ids=st.sampled_from([(), (5, 6)]),
            logprobs=st.sampled_from([None, 0, 3]),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_a_row_gets_the_same_token_and_logprobs_alone_and_in_any_batch(rows: list[SamplingSpec]) -> None:
    logits = logits_of(rows=len(rows))
    sequences = [sequence(s, seed=7 + i, output=i % 4) for i, s in enumerate(rows)]
    together = sample(logits, sequences)
    assert together == [sample(logits[i : i + 1], [s])[0] for i, s in enumerate(sequences)]
    order = torch.arange(len(rows)).flip(0)
    assert sample(logits[order], sequences[::-1]) == together[::-1]


def test_seeds_and_positions_draw_independently() -> None:
    flat = torch.zeros(1, VOCAB)
    assert len({one(flat, sequence(spec(), seed=i)) for i in range(40)}) > VOCAB // 2
    assert len({one(flat, sequence(spec(), output=i)) for i in range(40)}) > VOCAB // 2


# -- the distribution


def test_draws_are_distributed_as_the_models_probabilities() -> None:
    """Which tokens the limits leave of them: test_draw.py."""
    logits = logits_of(3)
    sequences = [sequence(spec(temperature=1.7), seed=seed) for seed in range(DRAWS)]
    counts = Counter(sampled.token for sampled in sample(logits.expand(DRAWS, -1), sequences))
    expected = (torch.softmax(logits[0].double() / 1.7, -1) * DRAWS).tolist()
    chi_square = sum((counts[token] - wanted) ** 2 / wanted for token, wanted in enumerate(expected))
    # Five standard deviations of the distribution that it has when the draws are right.
    assert chi_square < VOCAB - 1 + 5 * math.sqrt(2 * (VOCAB - 1)) + 5


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-7])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = logits_of(4, rows=8) * 50
    sequences = [sequence(spec(temperature=temperature), seed=i) for i in range(8)]
    assert [s.token for s in sample(logits, sequences)] == logits.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 11]] = 5.0
    assert one(logits, sequence(spec(greedy=True))) == 9


# -- penalties and forbidden tokens


def penalised(logits: torch.Tensor, s: Sequence) -> torch.Tensor:
    scores = logits[0].tolist()
    for token in set(s.tokens):
        scores[token] *= s.sampling.repetition_penalty ** (-1 if scores[token] > 0 else 1)
    for token, times in Counter(s.tokens[s.sampling.prompt_ignore_length :]).items():
        scores[token] -= s.sampling.presence_penalty + s.sampling.frequency_penalty * times
    return torch.tensor(scores)


@pytest.mark.parametrize(
    "wanted",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7, "presence_penalty": -1.0, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.7, "presence_penalty": 1.0, "prompt_ignore_length": 2},
    ],
    ids=repr,
)
def test_penalties_are_those_of_the_reference(wanted: dict[str, float]) -> None:
    output = [5, 5, 5, 9, 14]
    for seed in range(20):
        logits = logits_of(seed)
        s = sequence(spec(greedy=True, **wanted), prompt=[5, 7, 8], output=output)
        assert one(logits, s) == int(penalised(logits, s).argmax())
    untouched = logits_of(1)
    sample(untouched, [sequence(spec(greedy=True, **wanted), output=output)])
    assert torch.equal(untouched, logits_of(1)), "the model's logits stay as they are"


def test_min_tokens_forbids_what_would_end_the_answer_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 6], logits[0, 8] = 9.0, 8.0, 7.0
    wanted = spec(greedy=True, min_tokens=2, end_ids=(4,), stop_words=((6,), (8, 9)))
    assert one(logits, sequence(wanted, output=0)) == 8, "the start of a longer stop word ends nothing"
    assert one(logits, sequence(wanted, output=1)) == 8
    assert one(logits, sequence(wanted, output=2)) == 4


@pytest.mark.parametrize("greedy", [True, False])
def test_a_bad_token_never_comes(greedy: bool) -> None:
    best = torch.zeros(64, VOCAB)
    best[:, [2, 3]] = 10.0
    sequences = [sequence(spec(greedy=greedy, bad_token_ids=(2, 3)), seed=i) for i in range(64)]
    assert not {2, 3} & {s.token for s in sample(best, sequences)}


def test_tokens_that_the_model_does_not_have_are_ignored() -> None:
    wanted = spec(greedy=True, min_tokens=1, end_ids=(VOCAB,), bad_token_ids=(VOCAB + 7,))
    assert one(logits_of(), sequence(wanted)) == int(logits_of().argmax())


# -- logprobs


@pytest.mark.parametrize("count", [0, 1, 4, 64])
@pytest.mark.parametrize("greedy", [True, False])
def test_logprobs_are_the_models_own_ranked(count: int, greedy: bool) -> None:
    wanted = spec(greedy=greedy, logprobs=count, temperature=4.0, presence_penalty=3.0)
    logits = logits_of(5, rows=32)
    sampled = sample(logits, [sequence(wanted, seed=i, output=2) for i in range(32)])
    for row, got in zip(torch.log_softmax(logits, -1), sampled, strict=True):
        assert got.logprobs is not None
        ranked = row.argsort(descending=True).tolist()
        chosen, others = got.logprobs[0], got.logprobs[1:]
        assert chosen == (got.token, float(row[got.token]), ranked.index(got.token) + 1)
        top = [(t, float(row[t]), rank) for rank, t in enumerate(ranked[:count], 1)]
        assert others == [entry for entry in top if entry[0] != got.token]


def test_no_logprobs_unless_asked_for() -> None:
    asked, not_asked = sequence(spec(logprobs=0)), sequence(spec())
    assert [s.logprobs is None for s in sample(logits_of(rows=2), [not_asked, asked])] == [True, False]
