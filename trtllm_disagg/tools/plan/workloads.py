"""The workloads: arrivals and lengths of requests."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from trtllm_disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `arrival`: seconds after the first one."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    #: (name, tokens) of the parts that the prompt begins with. Prompts share parts of the same name. The last part can
    #: be the start of a longer one with that name, and the answer extends it.
    parts: tuple[tuple[Hashable, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean prompt tokens, output tokens and cacheable prompt tokens of a request."""

    input_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0


#: Tokens per hash of a Mooncake trace.
_HASH_TOKENS = 512


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


#: (rate, random numbers) -> an endless stream of requests.
Source = Callable[[float, random.Random], Iterator[Ask]]
#: A single burst arrives at once, at any rate.
_FEWEST_BURSTS = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    #: "chat", "rag", "reasoning", "agentic", "prefixes", "bursts" or "trace".
    name: str
    description: str
    shape: Shape
    source: Source
    #: Max prompt and output tokens of a request.
    longest: int
    #: Seconds per conversation. At the start, no cache has its earlier turns or shared prefixes.
    session_s: float = 0.0
    #: Requests that arrive at once.
    burst: int = 1
    #: Number of requests in a trace.
    num_lines: int | None = None

    def at_least(self, count: int) -> int:
        """At least `count` requests: more if those would be few bursts, fewer if a trace is shorter."""
        if self.num_lines is not None:
            return min(count, self.num_lines)
        return max(count, _FEWEST_BURSTS * self.burst) if self.burst > 1 else count

    def asks(self, rate: float, count: int) -> tuple[Ask, ...]:
        """The first `count` requests. Scales their arrivals to exactly `rate` requests/s, since a few random arrivals
        can have quite another rate.
        """
        stream = self.source(rate, random.Random(str(self.shape)))
        *asks, beyond = islice(stream, count + 1)
        if len(asks) < count:  # the end of a trace, which has the right rate
            return (*asks, beyond)
        stretch = count / rate / beyond.arrival if beyond.arrival else 1.0
        return tuple(replace(ask, arrival=ask.arrival * stretch) for ask in asks)


@dataclass(frozen=True, slots=True)
class Mix:
    """Conversations that begin at Poisson times; with one turn each, single requests."""

    #: Mean tokens that a turn adds to the prompt, besides the last answer, and of an answer.
    prompt: int
    answer: int
    turns: int = 1
    #: Common tokens that conversations begin with, and the number of different ones.
    prefix: int = 0
    prefixes: int = 1
    #: Conversations that begin at once.
    burst: int = 1
    #: Max deviation of a length from its mean, as a share.
    spread: float = 0.25

    #: Mean seconds between two turns. A turn is sent on time, even if the last one has no answer yet.
    THINKING: ClassVar = 2.0

    @property
    def shape(self) -> Shape:
        added = self.prompt + self.answer
        prompt = self.prefix + self.prompt + added * (self.turns - 1) / 2
        return Shape(prompt, self.answer, prompt - (self.prompt if self.turns == 1 else added))

    @property
    def longest(self) -> int:
        """Max prompt and output tokens of a request."""
        return self.prefix + self.turns * sum(
            round(mean * (1 + self.spread)) for mean in (self.prompt, self.answer)
        )

    @property
    def session_s(self) -> float:
        return self.turns * self.THINKING if self.turns > 1 else 8 * self.THINKING if self.prefix else 0.0

    def asks(self, rate: float, numbers: random.Random) -> Iterator[Ask]:
        # With several turns, some conversations are under way when the point begins.
        now, waiting = -self.session_s if self.turns > 1 else 0.0, list[Ask]()
        for session in count():
            for place in range(self.burst):
                waiting += self._turns(now, (session, place), numbers)
            now += numbers.expovariate(rate / self.turns / self.burst)
            waiting.sort(key=lambda each: each.arrival, reverse=True)
            while waiting and waiting[-1].arrival <= now:
                ask = waiting.pop()
                if ask.arrival >= 0:
                    yield ask

    def _turns(self, arrival: float, name: Hashable, numbers: random.Random) -> Iterator[Ask]:
        history, prefix = 0, ((numbers.randrange(self.prefixes), self.prefix),) if self.prefix else ()
        for _ in range(self.turns):
            history += self._around(self.prompt, numbers)
            answer = self._around(self.answer, numbers)
            own = ((name, history),) if self.turns > 1 else ()
            yield Ask(arrival, self.prefix + history, answer, prefix + own)
            history += answer
            arrival += numbers.expovariate(1 / self.THINKING) if self.turns > 1 else 0.0

    def _around(self, tokens: int, numbers: random.Random) -> int:
        return max(1, round(tokens * numbers.uniform(1 - self.spread, 1 + self.spread)))

    @property
    def description(self) -> str:
        tokens = f"{self.prompt} tokens in, {self.answer} out"
        turns = f"{self.turns} turns of {tokens}" if self.turns > 1 else tokens
        return f"{turns}, after {self.prefix} common ones" if self.prefix else turns

    def traffic(self, name: str, title: str = "") -> Traffic:
        description = f"{title}{', ' if title else ''}{self.description}"
        return Traffic(name, description, self.shape, self.asks, self.longest, self.session_s, self.burst)


BUILT_IN: dict[str, Traffic] = {
    name: mix.traffic(name, title)
    for name, title, mix in (
        ("chat", "short chats", Mix(256, 256)),
        ("rag", "long documents", Mix(8192, 256)),
        ("reasoning", "long answers", Mix(1024, 4096)),
        ("agentic", "agents", Mix(576, 192, turns=8, prefix=2048)),
        ("prefixes", "8 system prompts", Mix(256, 128, prefix=4096, prefixes=8)),
        ("bursts", "16 requests at once", Mix(1024, 256, burst=16)),
    )
}


def trace(file: Path, longest: int) -> Traffic:
    """Reads a Mooncake trace: lines {"timestamp": ms, "input_length", "output_length", "hash_ids"}, one hash per 512
    tokens. Scales its arrivals to a rate, and drops requests above `longest` tokens. Raises ConfigError for an invalid
    line.
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
        sum(line.input_length for line in lines) / count, sum(line.output_length for line in lines) / count
    )
    lengths = f"{shape.input_tokens:.0f} tokens in on average, {shape.output_tokens:.0f} out"
    longest_line = max(line.input_length + line.output_length for line in lines)
    return Traffic("trace", f"{count} requests, {lengths}", shape, source, longest_line, num_lines=count)


def _parts(line: TraceLine) -> Iterator[tuple[Hashable, int]]:
    left = line.input_length
    for name in line.hash_ids[: -(-left // _HASH_TOKENS)]:
        yield name, min(left, _HASH_TOKENS)
        left -= _HASH_TOKENS


def _lines(file: Path) -> Iterator[TraceLine]:
    try:
        # Some editors write a byte order mark.
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("workloads given as tokens in:out")
    text = "turns per conversation; each adds its tokens to those before (default: 1)"
    own.add_argument("--turns", type=int, metavar="N", help=text)
    text = "tokens that every prompt begins with, like a system prompt (default: 0)"
    own.add_argument("--shared-prefix", type=int, metavar="TOKENS", help=text)
    text = "how much lengths vary, as a share of their mean, 0 to 0.95 (default: 0.25)"
    own.add_argument("--spread", type=float, metavar="SHARE", help=text)


def chosen_workloads(args: argparse.Namespace, longest: int) -> dict[str, Traffic]:
    """Parses --workloads ("chat,4096:256"; default: all). Raises ConfigError for an unknown workload, or one with
    requests above `longest` tokens.
    """
    known = BUILT_IN | ({"trace": trace(args.trace, longest)} if args.trace else {})
    names, own, chosen = args.workloads, _own_of(args), {}
    if own and ":" not in (names or ""):
        raise ConfigError.bad_value("--workloads", names, f"tokens as 4096:256, for --{' and --'.join(own)}")
    changes = {"prefix" if name == "shared-prefix" else name: value for name, value in own.items()}
    for name in names.split(",") if names else known:
        if tokens := re.fullmatch(r"([1-9]\d{0,6}):([1-9]\d{0,6})", name):
            known[name] = replace(Mix(*map(int, tokens.groups())), **changes).traffic(name)
        if name not in known:
            allowed = f"one of {', '.join(known)}, tokens as 4096:256, or trace with --trace FILE"
            raise ConfigError.bad_value("--workloads", name, allowed)
        if (highest := known[name].longest) > longest:
            allowed = (
                f"requests of at most {longest} tokens, the engine's max_seq_len; this one has up to {highest}, since "
                "lengths vary (--spread 0: they do not)"
            )
            raise ConfigError.bad_value("--workloads", name, allowed)
        chosen[name] = known[name]
    return chosen


def _own_of(args: argparse.Namespace) -> dict[str, Any]:
    """The given flags of `add_arguments`."""
    limits = {"turns": (1, 1000), "shared-prefix": (0, 1_000_000), "spread": (0, 0.95)}
    own = {name: getattr(args, name.replace("-", "_"), None) for name in limits}
    for name, value in own.items():
        least, highest = limits[name]
        if value is not None and not least <= value <= highest:
            raise ConfigError.bad_value(f"--{name}", value, f"a number from {least} to {highest}")
    return {name: value for name, value in own.items() if value is not None}


def rates_of(text: str) -> tuple[float, ...]:
    """Parses --rates. Raises ConfigError."""
    try:
        rates: Sequence[float] = sorted({float(number) for number in text.split(",")})
    except ValueError:
        rates = ()
    if not rates or not 0.001 <= rates[0] <= rates[-1] <= 100_000:
        raise ConfigError.bad_value("--rates", text, "numbers from 0.001 to 100000 with commas between them")
    return tuple(rates)
