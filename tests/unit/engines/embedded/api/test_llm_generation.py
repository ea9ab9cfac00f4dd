"""What a client of the LLM API gets back."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.models import EOS, VOCAB
from trtllm_disagg.engines.embedded import LLM, CompletionOutput, SamplingParams

PROMPT = [7, 30, 200, 11, 64, 5]
#: The byte tokens that are printable ASCII, so that any two of them are text that is tokenized back to them.
NOT_TEXT = [0, EOS, *range(96, VOCAB)]


@pytest.fixture
def llm(embedded_llm: LLM) -> LLM:
    return embedded_llm


def sampled(**more: Any) -> SamplingParams:
    """A varied answer of text, the same every time."""
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 2.0, "seed": 5, "bad_token_ids": NOT_TEXT}
    return SamplingParams(**(settings | more))


async def run(llm: LLM, params: SamplingParams | None = None, **more: Any) -> CompletionOutput:
    result = await llm.generate_async(PROMPT, params, **more)
    assert result.finished
    output: CompletionOutput = result.outputs[0]
    return output


@pytest.fixture
async def answer(llm: LLM) -> list[int]:
    """What `sampled()` answers when nothing stops it."""
    tokens = (await run(llm, sampled())).token_ids
    assert len(tokens) == 24
    return tokens


# -- tokens


async def test_max_tokens_none_fills_a_pool_that_is_smaller_than_max_seq_len(
    checkpoints: Checkpoints,
) -> None:
    with LLM(checkpoints(), kv_cache_config={"max_tokens": 96}, max_seq_len=128) as llm:
        assert llm.max_seq_len == 96
        output = await run(llm, SamplingParams(max_tokens=None, ignore_eos=True))
        assert (output.length, output.finish_reason) == (96 - len(PROMPT), "length")
        with pytest.raises(ValueError, match="96 tokens; max_seq_len 96 leaves room for at most 95"):
            llm.generate_async([5] * 96)


async def test_max_tokens_none_fills_max_seq_len_and_more_is_cut_to_it(llm: LLM) -> None:
    for max_tokens in (None, 10_000):
        output = await run(llm, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert (output.length, output.finish_reason) == (512 - len(PROMPT), "length")


async def test_same_seed_repeats_an_answer_and_no_seed_does_not(llm: LLM, answer: list[int]) -> None:
    assert (await run(llm, sampled())).token_ids == answer
    others = [(await run(llm, sampled(seed=None))).token_ids for _ in range(2)]
    assert answer != others[0] != others[1]


# -- ends


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stop_string_is_cut_off_and_named(llm: LLM, answer: list[int], streaming: bool) -> None:
    text = llm.tokenizer.decode(answer)
    stop = text[8:11]
    output = await run(llm, sampled(stop=["never", stop], logprobs=0), streaming=streaming)
    assert output.text == text[: text.index(stop)]
    assert output.token_ids == answer[: text.index(stop)]
    assert len(output.logprobs) == len(output.token_ids)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


async def test_the_tokenizers_end_ends_an_answer_that_it_decodes(
    llm: LLM, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = answer[6]
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    monkeypatch.setattr(llm, "tokenizer", tokenizer)
    output = await run(llm, sampled())
    assert output.token_ids == answer[: answer.index(end)]
    assert output.finish_reason == "stop"
    for params in (sampled(detokenize=False), sampled(end_id=EOS), sampled(ignore_eos=True)):
        assert (await run(llm, params)).token_ids == answer


# -- logprobs


async def test_a_token_beyond_the_asked_ranks_is_added(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.15, "seed": 3}
    output = await run(llm, SamplingParams(**params, logprobs=1))
    assert {len(entry) for entry in output.logprobs} == {1, 2}
    assert all(token in entry for token, entry in zip(output.token_ids, output.logprobs, strict=True))
    assert (await run(llm, SamplingParams(**params))).token_ids == output.token_ids


# -- generate


def test_a_list_of_parameters_has_one_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([PROMPT, PROMPT], [sampled()])


async def test_a_bad_prompt_among_good_ones_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.generate([PROMPT, []], SamplingParams(max_tokens=400, ignore_eos=True))
    # By the time that another request has been answered, the engine has heard of the abort.
    assert (await run(llm, sampled())).length == 24
    assert llm.num_active_requests == 0
