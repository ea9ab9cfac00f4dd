"""What comes out of a request: growing outputs, ends, aborts, threads; and how often."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.conformance.api import IS_MODELLED, OTHER_PROMPT, PROMPT, find, needs_a_model, sampling

#: Varied, and the same every time.
SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 16}


async def run(llm: Any, **fields: Any) -> Any:
    result = await llm.generate_async(PROMPT, sampling(**(SAMPLED | fields))).aresult()
    assert result.finished
    return result.outputs[0]


@pytest.fixture
async def answer(llm: Any) -> list[int]:
    """Of SAMPLED, when nothing stops it."""
    output = await run(llm)
    assert (output.length, output.finish_reason, output.stop_reason) == (16, "length", None)
    return list(output.token_ids)


# -- streams


async def test_streamed_outputs_only_grow(llm: Any, answer: list[int]) -> None:
    # Long, since a reader that comes late gets all that is there in one update.
    result = llm.generate_async(PROMPT, sampling(**(SAMPLED | {"max_tokens": 400})), streaming=True)
    seen: list[list[int]] = []
    diffs: list[int] = []
    async for update in result:
        assert update is result
        output = update.outputs[0]
        assert (output.finish_reason is not None) == update.finished
        seen.append(list(output.token_ids))
        diffs += output.token_ids_diff
    assert (seen[-1], diffs[: len(answer)]) == (diffs, answer)
    assert len(seen) > 1
    assert all(after[: len(before)] == before for before, after in pairwise(seen))


async def test_without_streaming_there_is_one_update(llm: Any, answer: list[int]) -> None:
    updates = [
        list(update.outputs[0].token_ids) async for update in llm.generate_async(PROMPT, sampling(**SAMPLED))
    ]
    assert updates == [answer]


async def test_each_of_several_choices_grows_to_its_full_length(llm: Any) -> None:
    params = sampling(**(SAMPLED | {"n": 3, "best_of": 3, "logprobs": 0}))
    lengths: dict[int, int] = {}
    async for update in llm.generate_async(PROMPT, params, streaming=True):
        for output in update.outputs:
            assert output.length >= lengths.get(output.index, 0)
            lengths[output.index] = output.length
    assert lengths == {0: 16, 1: 16, 2: 16}


async def test_a_choice_is_the_answer_to_the_seed_plus_its_index(llm: Any) -> None:
    """Workers make a request of each choice; in one request TensorRT-LLM seeds them so (`createChildRequest`)."""
    params = sampling(**(SAMPLED | {"n": 3, "best_of": 3}))
    result = await llm.generate_async(PROMPT, params).aresult()
    alone = [await run(llm, seed=SAMPLED["seed"] + index) for index in range(3)]
    assert [list(output.token_ids) for output in result.outputs] == [list(each.token_ids) for each in alone]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3


async def test_neighbours_run_at_the_same_time(llm: Any) -> None:
    results = [llm.generate_async(p, sampling(max_tokens=12)) for p in (PROMPT, OTHER_PROMPT) * 3]
    lengths = [(await result.aresult()).outputs[0].length for result in results]
    assert lengths == [12] * 6


def test_a_plain_thread_may_wait_or_iterate(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling()).result(timeout=60)
    tokens = list(result.outputs[0].token_ids)
    streamed = [list(u.outputs[0].token_ids) for u in llm.generate_async(PROMPT, sampling(), streaming=True)]
    assert streamed[-1] == tokens
    assert [list(r.outputs[0].token_ids) for r in llm.generate([PROMPT], sampling())] == [tokens]


def test_generate_takes_parameters_for_all_or_for_each(llm: Any) -> None:
    params = [sampling(**(SAMPLED | {"max_tokens": count})) for count in (3, 5)]
    results = llm.generate([PROMPT, OTHER_PROMPT], params, use_tqdm=False)
    assert [result.outputs[0].length for result in results] == [3, 5]
    assert [result.prompt_token_ids for result in results] == [PROMPT, OTHER_PROMPT]
    assert [result.outputs[0].length for result in llm.generate([PROMPT, OTHER_PROMPT], params[0])] == [3, 3]
    assert llm.generate(PROMPT, params[1]).outputs[0].length == 5


async def test_text_differences_join_to_the_text(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(), streaming=True)
    text = "".join([update.outputs[0].text_diff async for update in result])
    assert text == result.outputs[0].text
    assert text
    assert (await run(llm, detokenize=False)).text == ""


# -- ends


async def test_an_end_token_is_not_returned(llm: Any, answer: list[int]) -> None:
    end = answer[7]
    output = await run(llm, end_id=end, ignore_eos=False)
    assert list(output.token_ids) == answer[: answer.index(end)]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


@pytest.mark.parametrize("shown", [False, True])
async def test_a_stop_token_is_named_and_returned_only_on_request(
    llm: Any, answer: list[int], shown: bool
) -> None:
    stop = answer[7]
    output = await run(
        llm, stop_token_ids=[stop], ignore_eos=False, end_id=-1, include_stop_str_in_output=shown
    )
    assert list(output.token_ids) == answer[: answer.index(stop) + shown]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


async def test_a_stop_string_ends_the_answer_where_it_begins(llm: Any, answer: list[int]) -> None:
    """It is matched as tokens, so it must be one that is tokenized back to them."""
    tokenizer = llm.tokenizer
    candidates = [(i, tokenizer.decode(answer[i : i + 2])) for i in range(4, 14)]
    found = [
        (i, text)
        for i, text in candidates
        if text and list(tokenizer.encode(text, add_special_tokens=False)) == answer[i : i + 2]
    ]
    if not found:
        pytest.skip("no two tokens of this answer are text that is tokenized back to them")
    at, text = found[0]
    output = await run(llm, stop=text, ignore_eos=False, end_id=-1)
    assert (output.finish_reason, output.stop_reason) == ("stop", text)
    assert list(output.token_ids) == answer[: output.length]
    assert output.length <= at


async def test_ignore_eos_ignores_stop_tokens_too(llm: Any, answer: list[int]) -> None:
    output = await run(llm, ignore_eos=True, end_id=answer[3], stop_token_ids=[answer[5]])
    assert list(output.token_ids) == answer


async def test_min_tokens_puts_an_end_off(llm: Any, answer: list[int]) -> None:
    output = await run(llm, end_id=answer[0], ignore_eos=False, min_tokens=9)
    assert output.length >= 9


async def test_an_abort_ends_the_stream_as_cancelled(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(max_tokens=400), streaming=True)
    async for update in result:
        if update.outputs[0].length and not update.finished:
            update.abort()
    assert result.outputs[0].finish_reason == "cancelled"
    assert result.outputs[0].length < 400


# -- logprobs


async def test_logprobs_of_the_prompt_are_about_the_token_behind_each_position(llm: Any) -> None:
    """The last one is about the first token of the answer. With 0 there is that token alone."""
    params = sampling(max_tokens=2, logprobs=2, prompt_logprobs=2)
    output = (await llm.generate_async(PROMPT, params, cache_salt="of the prompt").aresult()).outputs[0]
    behind = [*PROMPT[1:], output.token_ids[0]]
    assert len(output.prompt_logprobs) == len(PROMPT)
    for token, entry in zip(behind, output.prompt_logprobs, strict=True):
        best = [lp.logprob for other, lp in entry.items() if other != token or lp.rank <= 2]
        assert len(entry) in (2, 3) or IS_MODELLED
        assert entry[token].logprob <= max(best)
        assert (entry[token].rank == 1) == (entry[token].logprob == max(best))
    first = output.token_ids[0]
    assert output.prompt_logprobs[-1][first].logprob == pytest.approx(output.logprobs[0][first].logprob)
    params = sampling(max_tokens=1, prompt_logprobs=0)
    result = await llm.generate_async(PROMPT, params, cache_salt="of the prompt alone").aresult()
    assert [list(entry) for entry in result.outputs[0].prompt_logprobs] == [[token] for token in behind]


@needs_a_model
async def test_logprobs_are_aligned_with_the_tokens(llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(max_tokens=5, logprobs=2), streaming=True)
    async for update in result:
        output = update.outputs[0]
        assert len(output.logprobs) == len(output.token_ids)
        assert len(output.logprobs_diff) == len(output.token_ids_diff)
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert isinstance(entry[token], find("Logprob"))
        assert entry[token].logprob <= 0
        assert 2 <= len(entry) <= 3
    total = sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total, rel=1e-3)


# -- guides


@needs_a_model
async def test_a_guided_answer_matches(llm: Any) -> None:
    pattern = "(cat|dog)-[0-9]{2,3}"
    guide = find("GuidedDecodingParams")(regex=pattern)
    output = await run(llm, guided_decoding=guide, ignore_eos=False, max_tokens=40)
    assert output.finish_reason == "stop"
    assert re.fullmatch(pattern, output.text)


# -- the prefix cache


async def test_cached_tokens_count_whole_blocks(llm: Any) -> None:
    prompt = [9, *PROMPT[1:]]
    counts = []
    for _ in range(2):
        counts.append((await llm.generate_async(prompt, sampling(max_tokens=1)).aresult()).cached_tokens)
    assert counts[0] == 0
    assert 64 <= counts[1] < len(prompt)


async def test_a_salt_keeps_prefixes_apart(llm: Any) -> None:
    prompt = [10, *PROMPT[1:]]
    salts = ["a", "b", "a"]
    results = [await llm.generate_async(prompt, sampling(), cache_salt=salt).aresult() for salt in salts]
    cached = [result.cached_tokens for result in results]
    assert (cached[0], cached[1]) == (0, 0)
    assert cached[2] >= 64
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1


# -- engines with other settings


INTERVAL = 4


@pytest.fixture(scope="module")
def told_llm(make_llm: Callable[..., Any]) -> Iterator[Any]:
    with make_llm(stream_interval=INTERVAL, enable_chunked_prefill=True, max_num_tokens=64) as llm:
        yield llm


async def lengths(result: Any) -> list[int]:
    return [update.outputs[0].length async for update in result]


# -- stream_interval


async def test_a_stream_has_the_first_token_every_fourth_one_and_the_end(told_llm: Any, llm: Any) -> None:
    usual = await llm.generate_async(PROMPT, sampling(max_tokens=10, logprobs=1)).aresult()
    result = told_llm.generate_async(PROMPT, sampling(max_tokens=10, logprobs=1), streaming=True)
    seen = await lengths(result)
    # A slow reader gets several at once.
    assert set(seen) <= {1, 4, 8, 10}
    assert seen[-1] == 10
    output = result.outputs[0]
    assert list(output.token_ids) == list(usual.outputs[0].token_ids)
    assert [list(entry) for entry in output.logprobs] == [list(e) for e in usual.outputs[0].logprobs]


async def test_a_request_that_does_not_stream_is_not_concerned(told_llm: Any, llm: Any) -> None:
    usual = await llm.generate_async(PROMPT, sampling(max_tokens=11)).aresult()
    result = await told_llm.generate_async(PROMPT, sampling(max_tokens=11)).aresult()
    assert list(result.outputs[0].token_ids) == list(usual.outputs[0].token_ids)


async def test_several_choices_stream_apart(told_llm: Any) -> None:
    params = sampling(max_tokens=6, n=2, temperature=1.0, seed=5)
    result = told_llm.generate_async(OTHER_PROMPT, params, streaming=True)
    seen = {tuple(output.length for output in update.outputs) async for update in result}
    assert {length for pair in seen for length in pair} <= {0, 1, 4, 6}
    assert [output.length for output in result.outputs] == [6, 6]
