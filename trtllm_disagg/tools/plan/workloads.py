"""The workloads: for the simulation their requests with arrivals and lengths, for AIPerf the flags that make the same
traffic.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import msgspec

from trtllm_disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `arrival`: seconds from the first one."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    #: How the prompt begins, in parts by name: others that begin with parts of the same names begin alike. The last
    #: part may be the beginning of a longer one of that name, and an answer continues it.
    parts: tuple[tuple[Hashable, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """The mean numbers of a request's prompt tokens, output tokens, and prompt tokens that may be cached."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0


#: Tokens that one hash of a Mooncake trace stands for.
_HASH_TOKENS = 512


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


#: Makes an endless stream of requests: (rate, random numbers).
Source = Callable[[float, random.Random], Iterator[Ask]]
#: One burst alone arrives at once at any rate.
_FEWEST_BURSTS = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """A workload and the source of its requests."""

    #: A word: "chat", "rag", "reasoning", "agentic", "prefixes", "bursts", "trace".
    name: str
    description: str
    shape: Shape
    source: Source
    #: Prompt and output tokens of the longest possible request.
    longest: int
    #: AIPerf's flags for the same traffic.
    aiperf: tuple[str, ...] = ()
    #: Seconds of a conversation. Conversations under way at the beginning, and shared prefixes, are in no cache yet.
    session_s: float = 0.0
    #: Requests that arrive at once.
    burst: int = 1
    #: Of a trace: its requests. AIPerf sends them in this order, at Poisson times.
    lines: tuple[TraceLine, ...] = ()

    def at_least(self, count: int) -> int:
        """`count` requests, or more where that would be a few bursts, or fewer where a trace has no more."""
        if self.lines:
            return min(count, len(self.lines))
        return max(count, _FEWEST_BURSTS * self.burst) if self.burst > 1 else count

    def asks(self, rate: float, count: int) -> tuple[Ask, ...]:
        """The first `count` requests by arrival, at `rate` requests a second. Arrival times are scaled to exactly that
        rate: a few random arrivals may have quite another one.
        """
        stream = self.source(rate, random.Random(str(self.shape)))
        *asks, beyond = islice(stream, count + 1)
        if len(asks) < count:  # the end of a trace, which has the rate by itself
            return (*asks, beyond)
        stretch = count / rate / beyond.arrival if beyond.arrival else 1.0
        return tuple(replace(ask, arrival=ask.arrival * stretch) for ask in asks)


def _single(input_tokens: int, output_tokens: int, burst: int = 1) -> Source:
    """Independent prompts with lengths that vary by a quarter. Poisson arrivals of `burst` requests at once."""

    def source(rate: float, numbers: random.Random) -> Iterator[Ask]:
        now = 0.0
        while True:
            for _ in range(burst):
                yield Ask(now, _around(input_tokens, numbers), _around(output_tokens, numbers))
            now += numbers.expovariate(rate / burst)

    return source


#: Applications: their number, the tokens of the system prompt that each has, of a question to it and of the answer.
_APPLICATIONS, _PREFIX, _QUESTION, _REPLY = 8, 4096, 256, 128


def _application(rate: float, numbers: random.Random) -> Iterator[Ask]:
    for ask in _single(_QUESTION, _REPLY)(rate, numbers):
        parts = ((numbers.randrange(_APPLICATIONS), _PREFIX),)
        yield replace(ask, prompt_tokens=_PREFIX + ask.prompt_tokens, parts=parts)


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


def _agent(rate: float, numbers: random.Random) -> Iterator[Ask]:
    """Sessions with Poisson arrivals. A turn is sent at its time, whether or not the one before was answered."""
    # Some sessions are under way when the point begins.
    now = -_TURNS * _THINKING
    waiting: list[Ask] = []
    for session in count():
        history, arrival = 0, now
        for _ in range(_TURNS):
            history += _around(_ADDED, numbers)
            parts = ("system", _SYSTEM), (session, history)
            waiting.append(Ask(arrival, _SYSTEM + history, _around(_ANSWER, numbers), parts))
            arrival += numbers.expovariate(1 / _THINKING)
        now += numbers.expovariate(rate / _TURNS)
        waiting.sort(key=lambda each: each.arrival, reverse=True)
        while waiting and waiting[-1].arrival <= now:
            ask = waiting.pop()
            if ask.arrival >= 0:
                yield ask


_AGENT_INPUT = _SYSTEM + _ADDED * (_TURNS + 1) / 2


def _lengths(prompt: int, answer: int) -> tuple[str, ...]:
    """AIPerf's flags. A uniform length that varies by a quarter has this standard deviation."""
    flags = {"--isl": prompt, "--osl": answer}
    deviations = {f"{flag}-stddev": round(_VARIES * mean / math.sqrt(3)) for flag, mean in flags.items()}
    return tuple(text for flag, number in {**flags, **deviations}.items() for text in (flag, str(number)))


def _singles(name: str, description: str, prompt: int, answer: int, burst: int = 1) -> Traffic:
    """A workload of independent requests. `prompt` and `answer`: mean tokens."""
    flags = _lengths(prompt, answer)
    if burst > 1:
        # Gamma arrivals of this smoothness have the variance of Poisson bursts of so many.
        flags += ("--arrival-pattern", "gamma", "--arrival-smoothness", f"{1 / burst:g}")
    source, longest = _single(prompt, answer, burst), _longest(prompt, answer)
    return Traffic(name, description, Shape(prompt, answer), source, longest, flags, burst=burst)


_AGENTS = f"agents of {_TURNS} turns, {_AGENT_INPUT:.0f} tokens in on average, {_SYSTEM} of them common, {_ANSWER} out"
_AGENT_FLAGS = (
    *("--shared-system-prompt-length", str(_SYSTEM), "--isl", str(_ADDED - _ANSWER), "--osl", str(_ANSWER)),
    *("--conversation-turn-mean", str(_TURNS), "--conversation-turn-stddev", "0"),
)

BUILT_IN: dict[str, Traffic] = {
    traffic.name: traffic
    for traffic in (
        _singles("chat", "short chats, 256 tokens in, 256 out", 256, 256),
        _singles("rag", "long documents, 8192 tokens in, 256 out", 8192, 256),
        _singles("reasoning", "long answers, 1024 tokens in, 4096 out", 1024, 4096),
        Traffic(
            "agentic",
            _AGENTS,
            Shape(_AGENT_INPUT, _ANSWER, _AGENT_INPUT - _ADDED),
            _agent,
            _SYSTEM + _longest(*[_ADDED] * _TURNS, _ANSWER),
            _AGENT_FLAGS,
            session_s=_TURNS * _THINKING,
        ),
        Traffic(
            "prefixes",
            f"{_APPLICATIONS} system prompts of {_PREFIX} tokens, {_QUESTION} more tokens in, {_REPLY} out",
            Shape(_PREFIX + _QUESTION, _REPLY, _PREFIX),
            _application,
            _PREFIX + _longest(_QUESTION, _REPLY),
            (
                *("--prompt-prefix-length", str(_PREFIX)),
                *("--prompt-prefix-pool-size", str(_APPLICATIONS), *_lengths(_QUESTION, _REPLY)),
            ),
            session_s=_TURNS * _THINKING,
        ),
        _singles("bursts", "16 requests at once, 1024 tokens in, 256 out", 1024, 256, burst=16),
    )
}


def trace(file: Path, longest: int) -> Traffic:
    """A file of Mooncake's lines: {"timestamp": ms, "input_length", "output_length", "hash_ids"}, a hash for each 512
    tokens. Its arrivals are stretched to a rate. Requests with more than `longest` tokens are left out.

    Raises ConfigError for an invalid line.
    """
    lines = [line for line in _lines(file) if line.input_length + line.output_length <= longest]
    if len(lines) < 2:
        allowed = f"a trace with two requests of at most {longest} tokens, the engine's max_seq_len"
        raise ConfigError.bad_value("--trace", str(file), allowed)
    lines.sort(key=lambda line: line.timestamp)
    begin, count = lines[0].timestamp, len(lines)
    own_rate = (count - 1) / max((lines[-1].timestamp - begin) / 1000, 1e-3)

    def source(rate: float, numbers: random.Random) -> Iterator[Ask]:
        for line in lines:
            arrival = (line.timestamp - begin) / 1000 * own_rate / rate
            yield Ask(arrival, line.input_length, line.output_length, tuple(_parts(line)))

    shape = Shape(
        sum(line.input_length for line in lines) / count,
        sum(line.output_length for line in lines) / count,
    )
    description = (
        f"{count} requests, {shape.input_tokens:.0f} tokens in on average, {shape.output_tokens:.0f} out"
    )
    longest_line = max(line.input_length + line.output_length for line in lines)
    flags = ("--custom-dataset-type", "mooncake_trace", "--no-fixed-schedule")
    return Traffic("trace", description, shape, source, longest_line, flags, lines=tuple(lines))


def _parts(line: TraceLine) -> Iterator[tuple[Hashable, int]]:
    left = line.input_length
    for name in line.hash_ids[: -(-left // _HASH_TOKENS)]:
        yield name, min(left, _HASH_TOKENS)
        left -= _HASH_TOKENS


def _lines(file: Path) -> Iterator[TraceLine]:
    try:
        # A byte order mark, as some editors write it, is no part of the first line.
        texts = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.bad_value("--trace", str(file), f"a text file ({error})") from error
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                line = msgspec.convert(json.loads(text), TraceLine)
                if not math.isfinite(line.timestamp):
                    raise ValueError("a timestamp is a number of milliseconds")
            except (ValueError, msgspec.ValidationError) as error:
                allowed = f"timestamp, input_length, output_length, hash_ids as JSON ({error})"
                raise ConfigError.bad_value(
                    f"--trace: {file.name} line {number}", text[:60], allowed
                ) from None
            if line.input_length > 0 and line.output_length > 0:
                yield line


def chosen_workloads(names: str | None, trace_file: Path | None, longest: int) -> dict[str, Traffic]:
    """The workloads of `names` ("chat,4096:256"), all by default. Raises ConfigError for an unknown or too long one."""
    known = BUILT_IN | ({"trace": trace(trace_file, longest)} if trace_file else {})
    chosen = {}
    for name in names.split(",") if names else known:
        if own := re.fullmatch(r"([1-9]\d{0,6}):([1-9]\d{0,6})", name):
            prompt, answer = map(int, own.groups())
            known[name] = _singles(name, f"{prompt} tokens in, {answer} out", prompt, answer)
        if name not in known:
            allowed = f"one of {', '.join(known)}, tokens as 4096:256, or trace with --trace FILE"
            raise ConfigError.bad_value("--workloads", name, allowed)
        if (most := known[name].longest) > longest:
            allowed = f"requests of at most {longest} tokens, the engine's max_seq_len; this one has {most}"
            raise ConfigError.bad_value("--workloads", name, allowed)
        chosen[name] = known[name]
    return chosen


def rates_of(text: str) -> tuple[float, ...]:
    """The value of --rates. Raises ConfigError."""
    try:
        rates: Sequence[float] = sorted({float(number) for number in text.split(",")})
    except ValueError:
        rates = ()
    if not rates or not 0.001 <= rates[0] <= rates[-1] <= 100_000:
        raise ConfigError.bad_value("--rates", text, "numbers from 0.001 to 100000 with commas between them")
    return tuple(rates)
