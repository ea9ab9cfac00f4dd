"""A pair of which one engine multiplies bfloat16 and the other one computes the same model in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded import LLM, DisaggregatedParams, RequestOutput, SamplingParams
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import SETTING, this_cpu

pytestmark = pytest.mark.skipif(
    not this_cpu().has_bfloat16, reason="this CPU level does not multiply bfloat16"
)

PROMPT = [2 + (i * 7 + i * i) % 250 for i in range(70)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)
#: Of a greedy token's logprob; tests/unit/engines/embedded/model/test_bfloat16.py says where the difference is from.
TOLERANCE = 0.3


def start(checkpoints: Checkpoints) -> LLM:
    return LLM(
        checkpoints(),
        dtype="bfloat16",
        kv_cache_config={"max_tokens": 1024},
        cache_transceiver_config={"backend": "SHARED_MEMORY"},
        max_seq_len=256,
    )


@pytest.fixture(scope="module")
def native(checkpoints: Checkpoints) -> Iterator[LLM]:
    with start(checkpoints) as llm:
        yield llm


@pytest.fixture(scope="module")
def avx2(checkpoints: Checkpoints) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "avx2")
        llm = start(checkpoints)
    with llm:
        yield llm


def greedy(output: RequestOutput) -> list[tuple[int, float]]:
    answer = output.outputs[0]
    return [
        (token, entry[token].logprob) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    ]


@pytest.mark.parametrize("order", ["native to avx2", "avx2 to native"])
def test_a_handoff_between_cpu_levels_gives_the_answer_within_tolerance(
    native: LLM, avx2: LLM, order: str
) -> None:
    prefill, decode = (native, avx2) if order == "native to avx2" else (avx2, native)
    kind = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
    first = prefill.generate(PROMPT, PARAMS, disaggregated_params=kind)
    handoff = first.outputs[0].disaggregated_params
    assert handoff is not None
    taken = dataclasses.replace(handoff, request_type="generation_only")
    answer = greedy(decode.generate(PROMPT, PARAMS, disaggregated_params=taken))
    compared = 0
    for found, expected in zip(answer, greedy(native.generate(PROMPT, PARAMS)), strict=True):
        assert abs(found[1] - expected[1]) <= TOLERANCE, (answer, expected)
        compared += 1
        if found[0] != expected[0]:  # a near-tie: from here on the texts are two
            break
    assert compared >= 2
