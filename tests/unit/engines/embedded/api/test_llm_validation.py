"""What is wrong with a request is said at once, by name, before the engine hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.conftest import Checkpoints
from tests.support.models import VOCAB
from trtllm_disagg.engines.embedded import LLM, DisaggregatedParams, SamplingParams
from trtllm_disagg.engines.embedded.params.request_params import MIN_GLOBAL_ID, get_global_disagg_request_id
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
            "without enable_chunked_prefill, max_num_tokens 96 is the most",
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
        ({"prompt_token_ids": [5], "multi_modal_data": {}}, NotImplementedError, "multi_modal_data"),
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


@pytest.mark.parametrize(
    "params",
    [
        {"use_beam_search": True},
        {"embedding_bias": [1.0]},
        {"logits_processor": print},
        {"no_repeat_ngram_size": 2},
        {"top_p_decay": 0.5},
        {"thinking_token_budget": 9},
        {"thinking_token_budget": 0},
        {"return_context_logits": True},
        {"return_generation_logits": True},
        {"truncate_prompt_tokens": 3},
        {"best_of": 2},
    ],
    ids=lambda params: "-".join(params),
)
def test_a_field_that_is_not_served_is_refused_by_its_name(llm: LLM, params: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"SamplingParams.{next(iter(params))}"):
        llm.generate_async([5], SamplingParams(**params))


def test_best_of_below_n_is_refused() -> None:
    with pytest.raises(ValueError, match=r"best_of \(1\) cannot be less than n \(2\)"):
        SamplingParams(n=2, best_of=1)


@pytest.mark.parametrize("priority", [-0.1, 1.1])
def test_priorities_are_between_zero_and_one(llm: LLM, priority: float) -> None:
    with pytest.raises(ValueError, match="priority"):
        llm.generate_async([5], priority=priority)


@pytest.mark.parametrize("name", ["lora_request", "prompt_adapter_request"])
def test_an_argument_that_is_not_served_is_refused_by_its_name(llm: LLM, name: str) -> None:
    arguments: dict[str, Any] = {name: object()}
    with pytest.raises(NotImplementedError, match=name):
        llm.generate_async([5], **arguments)


# -- disaggregation


@pytest.mark.parametrize("kind", ["context_only", "generation_only"])
def test_phase_request_without_transceiver_backend_is_refused(llm: LLM, kind: str) -> None:
    with pytest.raises(ValueError, match=r"needs cache_transceiver_config\.backend, which is not set"):
        llm.generate_async([5], disaggregated_params=DisaggregatedParams(request_type=kind))


def test_an_unknown_phase_is_refused_where_it_is_named() -> None:
    with pytest.raises(ValueError, match="Unknown request type: prefill"):
        DisaggregatedParams(request_type="prefill")
    assert DisaggregatedParams(request_type="CONTEXT_ONLY").request_type == "context_only"


def test_request_type_context_and_generation_is_a_whole_request(llm: LLM) -> None:
    params = DisaggregatedParams(request_type="context_and_generation")
    output = llm.generate_async([5], disaggregated_params=params).result(timeout=30)
    assert output.outputs[0].length == 32
    assert output.disaggregated_params is None


def test_global_request_ids_never_repeat_and_are_bounded() -> None:
    ids = {get_global_disagg_request_id(3, 4) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(MIN_GLOBAL_ID <= i < 2**63 for i in ids)
    for node, process in ((256, 0), (-1, 0), (0, 64)):
        with pytest.raises(ValueError, match="must be in"):
            get_global_disagg_request_id(node, process)


def test_global_request_ids_are_not_predictable() -> None:
    """Engines meet by them."""
    ids = [get_global_disagg_request_id(3, 4) for _ in range(100)]
    assert ids != sorted(ids)
    assert len({made >> 50 for made in ids}) > 50


# -- construction


def test_an_unknown_argument_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ValidationError, match="max_batch_sice"):
        LLM(checkpoints(), max_batch_sice=2)


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: '/no/such/model' is not allowed"):
        LLM("/no/such/model")
