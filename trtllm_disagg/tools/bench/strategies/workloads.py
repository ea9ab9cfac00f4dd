"""Makes the requests of a workload: prompts and arrival times, the same for all arms. A prompt is a list of token ids,
so no tokenizer changes its length. Prompts share prefixes only.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.bench.strategies.records import Workload


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `arrival`: modelled seconds from the beginning of its point."""

    arrival: float
    prompt: tuple[int, ...]
    output_tokens: int
    session: str
    turn: int = 0
    #: Leading tokens of the prompt that an earlier request of the point had.
    known: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The mean numbers of a request's prompt tokens, output tokens, and prompt tokens that may be cached."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0


#: Makes so many token ids.
Tokens = Callable[[int], tuple[int, ...]]
#: Makes an endless stream of requests: (rate, tokens, random numbers).
Source = Callable[[float, Tokens, random.Random], Iterator[Ask]]


#: As few as the requests with which a point is compared at all (verdict.py).
_FEWEST_BURSTS = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload and the source of its requests."""

    record: Workload
    shape: Shape
    source: Source
    #: Prompt and output tokens of the longest possible request.
    longest: int
    #: Seconds of a conversation. Conversations under way when a point begins are in no cache yet.
    session_s: float = 0.0
    #: Requests that arrive at once.
    burst: int = 1

    def at_least(self, count: int) -> int:
        """`count` requests, or more where that would be a few bursts: one burst alone arrives at once at any rate."""
        return max(count, _FEWEST_BURSTS * self.burst) if self.burst > 1 else count

    def asks(self, rate: float, count: int, seed: str, vocabulary: int) -> tuple[Ask, ...]:
        """The first `count` requests by arrival, at `rate` requests a modelled second. Arrival times are scaled to
        exactly that rate: a few random arrivals may have quite another one.
        """
        # By name: the prompts of one workload do not depend on which others run.
        numbers = random.Random(f"{self.record.name} {seed}")
        # None of these ids is special.
        ids = range(min(256, vocabulary // 2), vocabulary)
        return self._first(rate, count, lambda length: tuple(numbers.choices(ids, k=length)), numbers)

    def lengths(self, rate: float, count: int) -> tuple[Ask, ...]:
        """As `asks`, with one fixed seed and prompts of zeros, for uses in which only lengths matter."""
        numbers = random.Random(self.record.name)
        return self._first(rate, count, lambda length: (0,) * length, numbers)

    def _first(self, rate: float, count: int, tokens: Tokens, numbers: random.Random) -> tuple[Ask, ...]:
        stream = self.source(rate, tokens, numbers)
        *asks, beyond = islice(stream, count + 1)
        if len(asks) < count:  # the end of a trace, which has the rate by itself
            return (*asks, beyond)
        stretch = count / rate / beyond.arrival if beyond.arrival else 1.0
        return tuple(replace(ask, arrival=ask.arrival * stretch) for ask in asks)


def _single(input_tokens: int, output_tokens: int, burst: int = 1) -> Source:
    """Independent prompts with lengths that vary by a quarter. Poisson arrivals of `burst` requests at once."""

    def source(rate: float, tokens: Tokens, numbers: random.Random) -> Iterator[Ask]:
        now, number = 0.0, 0
        while True:
            for _ in range(burst):
                prompt = tokens(_around(input_tokens, numbers))
                yield Ask(now, prompt, _around(output_tokens, numbers), str(number))
                number += 1
            now += numbers.expovariate(rate / burst)

    return source


#: How much shorter or longer than its mean a length may be, as a share.
_VARIES = 0.25


def _around(tokens: int, numbers: random.Random) -> int:
    return round(tokens * numbers.uniform(1 - _VARIES, 1 + _VARIES))


def _longest(*tokens: int) -> int:
    """The largest sum that `_around` makes of these means."""
    return sum(round(each * (1 + _VARIES)) for each in tokens)


#: The agent: tokens of the common system prompt, tokens that a turn adds (the last answer included), tokens of an
#: answer, turns of a session, and mean modelled seconds between two turns.
_SYSTEM, _ADDED, _ANSWER, _TURNS, _THINKING = 2048, 768, 192, 8, 2.0


def _agent(rate: float, tokens: Tokens, numbers: random.Random) -> Iterator[Ask]:
    """Sessions with Poisson arrivals. A turn is sent at its time, whether or not the one before was answered."""
    system = tokens(_SYSTEM)
    # Some sessions are under way when the point begins.
    now, sessions = -_TURNS * _THINKING, 0
    waiting: list[Ask] = []
    #: Prompt tokens of each session so far; all sessions share the system prompt.
    known: dict[str, int] = {}
    while True:
        prompt, arrival = system, now
        for turn in range(_TURNS):
            prompt = (*prompt, *tokens(_around(_ADDED, numbers)))
            waiting.append(Ask(arrival, prompt, _around(_ANSWER, numbers), str(sessions), turn))
            arrival += numbers.expovariate(1 / _THINKING)
        now += numbers.expovariate(rate / _TURNS)
        sessions += 1
        waiting.sort(key=lambda ask: ask.arrival, reverse=True)
        while waiting and waiting[-1].arrival <= now:
            ask = waiting.pop()
            if ask.arrival >= 0:
                yield replace(ask, known=known.get(ask.session, _SYSTEM if known else 0))
                known[ask.session] = len(ask.prompt)


_AGENT_INPUT = _SYSTEM + _ADDED * (_TURNS + 1) / 2


def _singles(name: str, description: str, prompt: int, answer: int, burst: int = 1) -> Traffic:
    """A workload of independent requests. `prompt` and `answer`: mean tokens."""
    record, source = Workload(name, description, prompt, answer), _single(prompt, answer, burst)
    return Traffic(record, Shape(prompt, answer), source, _longest(prompt, answer), burst=burst)


_AGENTS = f"agents of {_TURNS} turns with growing prompts, over one system prompt of {_SYSTEM} tokens"

BUILT_IN: dict[str, Traffic] = {
    traffic.record.name: traffic
    for traffic in (
        _singles("chat", "short chats: 256 tokens in, 256 out", 256, 256),
        _singles("rag", "long documents: 8192 in, 256 out", 8192, 256),
        _singles("reasoning", "long answers: 1024 in, 4096 out", 1024, 4096),
        Traffic(
            Workload("agentic", _AGENTS, _AGENT_INPUT, _ANSWER, _TURNS),
            Shape(_AGENT_INPUT, _ANSWER, _AGENT_INPUT - _ADDED),
            _agent,
            _SYSTEM + _longest(*[_ADDED] * _TURNS, _ANSWER),
            session_s=_TURNS * _THINKING,
        ),
        _singles("bursts", "16 requests at once: 1024 in, 256 out", 1024, 256, burst=16),
    )
}

#: Tokens that one hash of a Mooncake trace stands for.
_HASH_TOKENS = 512


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def trace(file: Path, longest: int) -> Traffic:
    """A file of Mooncake's lines: {"timestamp": ms, "input_length", "output_length", "hash_ids"}, a hash for each 512
    tokens. Its arrivals are stretched to the rate of a point. Requests with more than `longest` tokens are left out.

    Raises ConfigError for an invalid line.
    """
    lines = [line for line in _lines(file) if line.input_length + line.output_length <= longest]
    if len(lines) < 2:
        allowed = f"a trace with two requests of at most {longest} tokens, the engine's max_seq_len"
        raise ConfigError.bad_value("--trace", str(file), allowed)
    lines.sort(key=lambda line: line.timestamp)
    begin = lines[0].timestamp
    own_rate = (len(lines) - 1) / max((lines[-1].timestamp - begin) / 1000, 1e-3)

    def source(rate: float, tokens: Tokens, numbers: random.Random) -> Iterator[Ask]:
        blocks: dict[int, tuple[int, ...]] = {}
        for number, line in enumerate(lines):
            known = _known_tokens(line, blocks.keys())
            prompt: list[int] = []
            for block in line.hash_ids:
                if block not in blocks:
                    blocks[block] = tokens(_HASH_TOKENS)
                prompt += blocks[block]
            prompt += tokens(max(0, line.input_length - len(prompt)))
            arrival = (line.timestamp - begin) / 1000 * own_rate / rate
            yield Ask(
                arrival, tuple(prompt[: line.input_length]), line.output_length, str(number), known=known
            )

    seen: set[int] = set()
    reused = 0
    for line in lines:
        reused += _known_tokens(line, seen)
        seen |= set(line.hash_ids)
    count = len(lines)
    shape = Shape(
        sum(line.input_length for line in lines) / count,
        sum(line.output_length for line in lines) / count,
        reused / count,
    )
    said = f"{count} requests of a trace: {shape.input_tokens:.0f} in, {shape.output_tokens:.0f} out"
    record = Workload("trace", said, shape.input_tokens, shape.output_tokens, trace_file=str(file))
    return Traffic(record, shape, source, max(line.input_length + line.output_length for line in lines))


def _known_tokens(line: _Line, seen: Collection[int]) -> int:
    """Tokens of the prompt's prefix that is in `seen`; never the last token, which an engine always computes."""
    shared = takewhile(lambda block: block in seen, line.hash_ids)
    return min(_HASH_TOKENS * sum(1 for _ in shared), line.input_length - 1)


def _lines(file: Path) -> Iterator[_Line]:
    try:
        # A byte order mark, as some editors write it, is no part of the first line.
        texts = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.bad_value("--trace", str(file), f"a text file ({error})") from error
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                line = msgspec.convert(json.loads(text), _Line)
                if not math.isfinite(line.timestamp):
                    raise ValueError("a timestamp is a number of milliseconds")
            except (ValueError, msgspec.ValidationError) as error:
                allowed = f"timestamp, input_length, output_length, hash_ids as JSON ({error})"
                raise ConfigError.bad_value(
                    f"--trace: {file.name} line {number}", text[:60], allowed
                ) from None
            if line.input_length > 0 and line.output_length > 0:
                yield line
