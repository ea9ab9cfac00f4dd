"""Requests of a workload: the same for all arms, as long as they should be, at the rate that was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN, trace

VOCABULARY = 3072


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_requests_come_in_order_at_the_given_rate_and_lengths(name: str) -> None:
    traffic = BUILT_IN[name]
    asks = traffic.asks(2.0, 200, "seed", VOCABULARY)
    arrivals = [ask.arrival for ask in asks]
    assert arrivals == sorted(arrivals)
    # Also of a few, which by chance alone would be anything. Bursts are not divided.
    assert arrivals[-1] == pytest.approx(100, abs=8)
    assert traffic.asks(2.0, 32, "seed", VOCABULARY)[-1].arrival == pytest.approx(16, abs=8)
    assert sum(len(ask.prompt) for ask in asks) / 200 == pytest.approx(traffic.record.input_tokens, rel=0.15)
    assert sum(ask.output_tokens for ask in asks) / 200 == pytest.approx(
        traffic.record.output_tokens, rel=0.1
    )
    assert all(256 <= token < VOCABULARY for token in asks[0].prompt)


def test_prompts_repeat_with_their_seed_and_differ_with_another() -> None:
    chat = BUILT_IN["chat"]
    assert chat.asks(2.0, 20, "a", VOCABULARY) == chat.asks(2.0, 20, "a", VOCABULARY)
    assert chat.asks(2.0, 20, "a", VOCABULARY)[0].prompt != chat.asks(2.0, 20, "b", VOCABULARY)[0].prompt


def test_turns_of_an_agent_begin_with_the_prompt_of_the_turn_before() -> None:
    last: dict[str, tuple[int, ...]] = {}
    grown = 0
    for ask in BUILT_IN["agentic"].asks(4.0, 120, "seed", VOCABULARY):
        before = last.get(ask.session, ())
        assert ask.prompt[: len(before)] == before
        grown += bool(before)
        last[ask.session] = ask.prompt
    assert grown > 20
    assert len({prompt[:2048] for prompt in last.values()}) == 1


def shared(prompt: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), len(other))


@pytest.mark.parametrize("name", ["chat", "agentic", "trace"])
def test_of_each_prompt_it_is_known_how_many_tokens_another_one_began_with_before(
    name: str, tmp_path: Path
) -> None:
    # As in a trace: a block of the same hash stands behind the same blocks.
    lines = ([1], [1, 2], [3, 6], [1, 2, 4], [1, 5, 7], [3, 6, 8])
    (tmp_path / "trace.jsonl").write_text(
        "".join(
            f'{{"timestamp": {i}, "input_length": {512 * len(ids) + 1}, "output_length": 8, "hash_ids": {ids}}}\n'
            for i, ids in enumerate(lines)
        )
    )
    traffic = trace(tmp_path / "trace.jsonl", 4096) if name == "trace" else BUILT_IN[name]
    asks = traffic.asks(4.0, 60, "seed", VOCABULARY)
    for number, ask in enumerate(asks):
        assert ask.known == max((shared(ask.prompt, other.prompt) for other in asks[:number]), default=0)
    assert [ask.known for ask in traffic.lengths(4.0, 60)][:3] == [ask.known for ask in asks][:3]
    assert any(ask.known for ask in asks) == (name != "chat")


def test_a_burst_arrives_at_once() -> None:
    asks = BUILT_IN["bursts"].asks(4.0, 48, "seed", VOCABULARY)
    assert len({ask.arrival for ask in asks}) == 3


def test_requests_of_a_trace_share_the_tokens_of_their_hashes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 4]}\n'
        '{"timestamp": 3000, "input_length": 90000, "output_length": 9, "hash_ids": [5]}\n'
    )
    traffic = trace(file, 4096)
    first, second = traffic.asks(2.0, 10, "seed", VOCABULARY)
    assert (len(first.prompt), len(second.prompt), second.output_tokens) == (1300, 1100, 9)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1100] != second.prompt[1024:1100]
    assert (first.arrival, second.arrival) == (0.0, 0.5)
    assert traffic.shape.cached_tokens == 512


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_no_request_is_longer_than_its_workloads_longest(name: str) -> None:
    traffic = BUILT_IN[name]
    longest = max(len(ask.prompt) + ask.output_tokens for ask in traffic.asks(2.0, 300, "seed", VOCABULARY))
    assert 0.8 * traffic.longest < longest <= traffic.longest


@pytest.mark.parametrize("length", [100, 512, 700])
def test_of_a_prompt_that_was_there_before_the_last_token_is_computed(tmp_path: Path, length: int) -> None:
    """Where nothing were left to compute, no rate and no clock could be chosen."""
    file = tmp_path / "trace.jsonl"
    line = f'{{"timestamp": 1, "input_length": {length}, "output_length": 8, "hash_ids": [1, 2]}}\n'
    file.write_text(line * 1000)
    shape = trace(file, 4096).shape
    assert shape.cached_tokens <= shape.input_tokens - 1


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"timestamp": 1, "input_length": 9, "output_length": 1}\n' * 2)
    assert len(trace(file, 4096).asks(2.0, 10, "seed", VOCABULARY)) == 2


def test_a_file_that_is_no_text_or_not_there_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pytest.raises(ConfigError, match=r"--trace: .*trace\.jsonl.*No such file"):
        trace(file, 4096)
    file.write_bytes(b"\x80\x81")
    with pytest.raises(ConfigError, match=r"--trace: .*trace\.jsonl.*text file"):
        trace(file, 4096)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"timestamp": 1}',
        '{"timestamp": 1, "input_length": "a", "output_length": 1}',
        '{"timestamp": NaN, "input_length": 9, "output_length": 1}',
    ],
)
def test_invalid_trace_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{{"timestamp": 1, "input_length": 9, "output_length": 1}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"--trace: trace.jsonl line 2"):
        trace(file, 4096)


def test_a_trace_of_requests_that_are_all_too_long_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 900, "output_length": 1}\n' * 2)
    with pytest.raises(ConfigError, match=r"--trace.*at most 512 tokens"):
        trace(file, 512)
