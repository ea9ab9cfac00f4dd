"""What is wrong with a request is said at once, by name, before the engine hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.models import VOCAB
from trtllm_disagg.engines.embedded import LLM, DisaggregatedParams, SamplingParams
from trtllm_disagg.engines.embedded.params.request_params import get_global_disagg_request_id
from trtllm_disagg.errors import ConfigError

MAX_SEQ_LEN, MAX_NUM_TOKENS = 512, 96


@pytest.fixture
def llm(embedded_llm: LLM) -> LLM:
    return embedded_llm


@pytest.fixture(autouse=True)
def _the_engine_never_hears_of_it(llm: LLM) -> Iterator[None]:
    yield
    assert len(llm._running) == 0, "it was sent"
    assert len(llm.generate([5, 6]).outputs[0].token_ids) == 32


@pytest.mark.parametrize(
    ("inputs", "error", "reason"),
    [
        ([], ValueError, "the prompt is empty"),
        ([5] * MAX_SEQ_LEN, ValueError, "512 tokens; max_seq_len 512 leaves room for at most 511"),
        (
            [5] * (MAX_NUM_TOKENS + 1),
            ValueError,
            "without enable_chunked_prefill, at most max_num_tokens 96 are allowed",
        ),
        ([5, VOCAB], ValueError, r"token ids outside \[0, 258\)"),
        ([5, -1], ValueError, r"token ids outside \[0, 258\)"),
        ("", ValueError, "the prompt is empty"),
        (7, TypeError, "must be type str or list of int, but got <class 'int'>"),
        (None, TypeError, "NoneType"),
        (b"\x05", TypeError, "bytes"),
        ([5, "6"], TypeError, "list"),
        ({}, TypeError, "NoneType"),
        ({"prompt_token_ids": [5.5]}, TypeError, "list"),
        ({"prompt_token_ids": [5], "query": {}}, NotImplementedError, "query"),
        (np.asarray([5.0]), TypeError, "ndarray"),
    ],
    ids=repr,
)
def test_invalid_prompt_is_refused_with_the_reason(
    llm: LLM, inputs: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        llm.generate_async(inputs)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is not allowed; expected between 1 and 2147483648"),
        ({"max_tokens": -5}, "max_tokens=-5"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"n": 0}, "n=0"),
        ({"n": 5}, "n=5 is more than max_batch_size 4"),
        ({"temperature": -0.1}, "temperature=-0.1 is not allowed; expected between 0 and 1000000"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1"),
        (
            {"max_tokens": 10**12},
            "max_tokens=1000000000000 is not allowed; expected between 1 and 2147483648",
        ),
        ({"top_p": 1.1}, "top_p=1.1 is not allowed; expected between 0 and 1"),
        ({"min_p": 2.0}, "min_p=2.0"),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty=0.0 is not allowed; expected between 0.000001 and 1000000",
        ),
        ({"logprobs": 1000}, "logprobs=1000"),
        ({"stop_token_ids": [VOCAB]}, r"stop_token_ids holds 258; expected token ids in \[0, 258\)"),
        ({"bad_token_ids": ["a"]}, "bad_token_ids holds 'a'"),
        ({"end_id": VOCAB}, "end_id holds 258"),
        ({"end_id": -2}, "end_id holds -2"),
    ],
    ids=repr,
)
def test_sampling_params_out_of_range_are_refused(llm: LLM, params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        llm.generate_async([5], SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 20.0},
        {"max_tokens": np.int64(20)},
        {"n": True},
        {"top_k": 40.0, "temperature": 1.0},
        {"top_k": True},
        {"temperature": np.float64(0.5)},
        {"temperature": True},
        {"seed": 1.5},
        {"logprobs": 1.5},
        {"logprobs": True},
        {"end_id": True},
        {"stop_token_ids": [True]},
        {"bad_token_ids": [True]},
        {"include_stop_str_in_output": 1},
        {"stop": "\ud800"},
    ],
    ids=repr,
)
def test_sampling_params_of_the_wrong_type_are_refused(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        llm.generate_async([5], SamplingParams(**params))


@pytest.mark.parametrize(
    "arguments",
    [{"cache_salt": 5}, {"cache_salt": "\ud800"}, {"priority": True}, {"priority": "0.5"}],
    ids=repr,
)
def test_an_argument_of_the_wrong_type_is_refused(llm: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        llm.generate_async([5], **arguments)


# -- disaggregation


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_phase_request_without_transceiver_backend_is_refused(llm: LLM, kind: str) -> None:
    with pytest.raises(ValueError, match=r"needs cache_transceiver_config\.backend, which is not set"):
        llm.generate_async([5], disaggregated_params=DisaggregatedParams(request_type=kind))


def test_global_request_ids_are_not_predictable() -> None:
    """Engines meet by them."""
    ids = [get_global_disagg_request_id(3, 4) for _ in range(100)]
    assert ids != sorted(ids)
    assert len({made >> 50 for made in ids}) > 50


# -- construction


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: '/no/such/model' is not allowed"):
        LLM("/no/such/model")
