"""Requests of a workload: as long as they should be, at the given rate, in the simulation and by AIPerf."""

from __future__ import annotations

import argparse
from collections.abc import Hashable
from pathlib import Path

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.plan.workloads import BUILT_IN, Ask, Traffic, chosen_workloads, rates_of, trace


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_requests_come_in_order_at_the_given_rate_and_lengths(name: str) -> None:
    traffic = BUILT_IN[name]
    asks = traffic.asks(2.0, 200)
    arrivals = [ask.arrival for ask in asks]
    assert arrivals == sorted(arrivals)
    # Also of a few, which by chance alone would be anything. Bursts are not divided.
    assert arrivals[-1] == pytest.approx(100, abs=8)
    assert traffic.asks(2.0, 32)[-1].arrival == pytest.approx(16, abs=10)
    assert sum(ask.prompt_tokens for ask in asks) / 200 == pytest.approx(traffic.shape.input_tokens, rel=0.15)
    assert sum(ask.output_tokens for ask in asks) / 200 == pytest.approx(traffic.shape.output_tokens, rel=0.1)
    assert asks == traffic.asks(2.0, 200)
    longest = max(ask.prompt_tokens + ask.output_tokens for ask in traffic.asks(2.0, 300))
    assert 0.8 * traffic.longest < longest <= traffic.longest


def test_a_turn_of_an_agent_begins_with_the_system_prompt_and_its_own_turns_and_answers_before() -> None:
    last: dict[Hashable, Ask] = {}
    asks = BUILT_IN["agentic"].asks(4.0, 120)
    for ask in asks:
        (_, common), (session, own) = ask.parts
        assert (common, common + own) == (2048, ask.prompt_tokens)
        if before := last.get(session):
            assert own > before.parts[1][1] + before.output_tokens
        last[session] = ask
    assert 15 < len(last) < 60


def test_a_burst_arrives_at_once_and_a_point_has_ten_of_them() -> None:
    bursts = BUILT_IN["bursts"]
    assert len({ask.arrival for ask in bursts.asks(4.0, 48)}) == 3
    assert (bursts.at_least(20), BUILT_IN["chat"].at_least(20)) == (160, 20)


def test_a_prompt_of_a_trace_has_a_part_for_each_hash(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 3000, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2]}\n'
        '{"timestamp": 3000, "input_length": 90000, "output_length": 9, "hash_ids": [5]}\n'
    )
    traffic = trace(file, 4096)
    first, second = traffic.asks(2.0, 10)
    assert (first.prompt_tokens, second.prompt_tokens, second.output_tokens) == (1300, 1100, 9)
    assert first.parts == ((1, 512), (2, 512), (3, 276))
    assert second.parts == ((1, 512), (2, 512))
    assert (first.arrival, second.arrival) == (0.0, 0.5)
    assert traffic.at_least(100) == 2


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"timestamp": 1, "input_length": 9, "output_length": 1}\n' * 2)
    assert len(trace(file, 4096).asks(2.0, 10)) == 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        (b"\x80\x81", "text file"),
        (b'{"timestamp": 1, "input_length": 9, "output_length": 1}\n{', "line 2"),
        (b'{"timestamp": 1}', "line 1"),
        (b'{"timestamp": 1, "input_length": "a", "output_length": 1}', "line 1"),
        (b'{"timestamp": NaN, "input_length": 9, "output_length": 1}', "line 1"),
        (b'{"timestamp": 1, "input_length": 900, "output_length": 1}\n' * 2, "at most 512 tokens"),
    ],
)
def test_invalid_trace_is_refused_by_name(tmp_path: Path, content: bytes | None, named: str) -> None:
    file = tmp_path / "trace.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--trace.*{named}"):
        trace(file, 512)


def test_unknown_and_too_long_workloads_are_refused_by_name() -> None:
    assert list(chosen()) == list(BUILT_IN)
    with pytest.raises(ConfigError, match=r"--workloads: 'news'.*chat"):
        chosen("chat,news")
    with pytest.raises(ConfigError, match=r"--workloads: 'rag'.*4096"):
        chosen("chat,rag", longest=4096)


def chosen(names: str | None = None, longest: int = 1 << 17, **own: object) -> dict[str, Traffic]:
    return chosen_workloads(argparse.Namespace(workloads=names, trace=None, **own), longest)


def test_turns_a_shared_prefix_and_the_spread_of_lengths_are_flags() -> None:
    (traffic,) = chosen("500:100", turns=10, shared_prefix=3000, spread=0.0).values()
    asks = [ask for ask in traffic.asks(2.0, 200) if ask.parts[1][0] == (7, 0)]
    assert [ask.prompt_tokens for ask in asks] == [3500 + 600 * turn for turn in range(10)]
    assert {ask.parts[0] for ask in asks} == {(0, 3000)}
    assert traffic.shape.input_tokens == 3500 + 600 * 4.5
    assert traffic.longest == asks[-1].prompt_tokens + 100
    # What does not vary fits exactly.
    assert chosen("16284:100", longest=16384, spread=0.0)
    with pytest.raises(ConfigError, match=r"up to 20480, since lengths vary"):
        chosen("16284:100", longest=16384)


@pytest.mark.parametrize("text", ["", "0", "a", "1,-2", "nan", "1e9"])
def test_wrong_rates_are_refused(text: str) -> None:
    assert rates_of("4,2,4") == (2.0, 4.0)
    with pytest.raises(ConfigError, match="--rates"):
        rates_of(text)
