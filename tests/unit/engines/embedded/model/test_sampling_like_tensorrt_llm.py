"""Sampling parameters mean what TensorRT-LLM's documentation says of them (features/sampling.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.unit.engines.embedded.model.test_sampler import one, sequence
from trtllm_disagg.engines.embedded.api.request import sampling_spec
from trtllm_disagg.engines.embedded.ipc.messages import Ready, SamplingSpec
from trtllm_disagg.engines.embedded.params.request_params import SamplingParams

VOCABULARY, LEFT_OUT = 258, 77
READY = Ready(
    num_blocks=8,
    tokens_per_block=32,
    vocab_size=VOCABULARY,
    max_seq_len=256,
    transport="off",
    end_ids=[],
    pids=[],
)
#: All tokens but one.
PROMPT = [token for token in range(VOCABULARY) if token != LEFT_OUT]


def spec_of(**given: Any) -> SamplingSpec:
    return sampling_spec(
        SamplingParams(**given),
        num_prompt=100,
        request_type="context_and_generation",
        ready=READY,
        end_ids=READY.end_ids,
        tokenize=lambda text: list(text.encode()),
        guided_backend=None,
    )


@pytest.fixture(scope="module")
def core(checkpoints: Checkpoints) -> Iterator[Core]:
    made = Core(checkpoints("llama"))
    yield made
    made.close()


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_counts_the_prompt_too(core: Core, name: str) -> None:
    answer = core.run(core.add(PROMPT, sampling=spec_of(max_tokens=1, **{name: 1000.0})))
    assert answer.tokens == [LEFT_OUT]


def test_the_ignored_part_of_the_prompt_is_not_counted(core: Core) -> None:
    unpenalised = core.generate(PROMPT, 1)
    ignoring = spec_of(max_tokens=1, presence_penalty=1000.0, prompt_ignore_length=1000)
    assert core.run(core.add(PROMPT, sampling=ignoring)).tokens == unpenalised != [LEFT_OUT]


def drawn(probabilities: list[float], **given: Any) -> set[int]:
    logits = torch.tensor([probabilities]).log()
    return {one(logits, sequence(spec_of(seed=seed, **given), seed=seed)) for seed in range(200)}


def test_min_p_alone_samples() -> None:
    assert drawn([0.5, 0.3, 0.1, 0.1], min_p=0.5) == {0, 1}


def test_min_p_of_one_is_greedy() -> None:
    assert drawn([0.4, 0.4, 0.2], min_p=1.0, temperature=1.0) == {0}


@pytest.mark.parametrize("vocabulary", [5, 9000])
def test_top_p_is_a_share_of_what_min_p_left(vocabulary: int) -> None:
    """Of 5/7 and 2/7 the first has 0.7 already."""
    probabilities = [0.5, 0.2, 0.1, 0.1, 0.1] + [1e-12] * (vocabulary - 5)
    assert drawn(probabilities, min_p=0.3, top_p=0.7) == {0}
    assert drawn(probabilities, min_p=0.3, top_p=0.72) == {0, 1}


def test_the_bad_word_that_is_refused_is_named_also_behind_an_empty_one() -> None:
    with pytest.raises(NotImplementedError, match="'long word' is more than one token"):
        spec_of(bad=["", "x", "long word"])
