"""Which worker did what when, from the workers' request traces (handlers/trace.py), drawn as bars."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trtllm_disagg.demo.chat import Answer
from trtllm_disagg.handlers.trace import PREFIX

#: Of a bar.
_WIDEST, _NARROWEST = 60, 20


class KvTransfer(msgspec.Struct, frozen=True):
    """Of KV that came to this worker (handlers/trace.py); zero when none did."""

    kv_transfer_ms: float = 0.0
    kv_transfer_bytes: int = 0


class Entry(msgspec.Struct, frozen=True):
    """One worker's line about one request; times in seconds since the epoch."""

    request: str
    part: str
    prompt_tokens: int
    tokens: int
    start: float
    end: float
    finish_reason: str | None = None
    first_chunk: float | None = None
    second_chunk: float | None = None
    disagg: KvTransfer = KvTransfer()


@dataclass(frozen=True, slots=True)
class Timeline:
    answer: Answer
    #: Of the request that ended last, by worker name.
    entries: Mapping[str, Entry]


def read_timeline(logs: Mapping[str, Path], answer: Answer) -> Timeline:
    """`logs` by worker name."""
    found = {name: [e for e in _entries(log) if e.start >= answer.sent - 1e-3] for name, log in logs.items()}
    return Timeline(answer, {name: entries[-1] for name, entries in found.items() if entries})


def _entries(log: Path) -> Iterator[Entry]:
    for line in log.read_text(errors="replace").splitlines():
        _, found, entry = line.partition(f": {PREFIX}")
        if found:
            yield msgspec.convert(json.loads(entry), Entry)


def render(timeline: Timeline, columns: int) -> str:
    """Bars on one scale, one row for the client and each worker, and the two times that matter; in lines of so many
    columns, if there are at least 80.
    """
    answer = timeline.answer
    total = answer.done - answer.sent
    row = _Rows(total, columns).row
    lines = row("client", 0.0, answer.first_text - answer.sent, total, "waits ░ reads █")
    for name, entry in sorted(timeline.entries.items(), key=lambda item: item[1].start):
        begin, end = entry.start - answer.sent, entry.end - answer.sent
        first = (entry.first_chunk or entry.end) - answer.sent
        lines += row(name, begin, first, end, _what(entry))
    lines.append(f"   first token at the client after {_ms(answer.first_text - answer.sent)}")
    if handoff := _handoff(timeline):
        lines.append(f"   handoff (KV moved to decode, and the second token computed there): {_ms(handoff)}")
    for entry in timeline.entries.values():
        if entry.disagg.kv_transfer_ms:
            kib = entry.disagg.kv_transfer_bytes / 1024
            lines.append(
                f"   {kib:,.0f} KiB of KV were on their way for {entry.disagg.kv_transfer_ms:.1f} ms"
            )
    return "\n".join(lines)


def _what(entry: Entry) -> str:
    role = entry.part.split("/")[0]
    if role == "prefill" and entry.tokens == 1:
        return f"prefilled {entry.prompt_tokens} tokens, gave token 1"
    if role == "prefill":
        return (
            f"prefilled {entry.prompt_tokens} tokens, gave token 1, passed on {entry.tokens - 1} of decode's"
        )
    if entry.part.endswith("decode_first"):
        return f"passed on token 1, decoded {entry.tokens - 1}"
    return f"decoded {entry.tokens}"


def _handoff(timeline: Timeline) -> float | None:
    """From the first token to the second one, at the worker that saw both."""
    for entry in timeline.entries.values():
        if (
            entry.first_chunk is not None
            and entry.second_chunk is not None
            and entry.start == _first_start(timeline)
        ):
            return entry.second_chunk - entry.first_chunk
    return None


def _first_start(timeline: Timeline) -> float:
    return min(entry.start for entry in timeline.entries.values())


class _Rows:
    """A name, a bar, its times; what it was behind that, or on a line of its own."""

    def __init__(self, total: float, columns: int) -> None:
        self._total = total
        self._columns = columns
        self._width = min(max(columns - len(self._line("", "", 0.0, 0.0)), _NARROWEST), _WIDEST)

    def row(self, name: str, begin: float, first: float, end: float, what: str) -> list[str]:
        """Light until the first token, solid after it."""
        start, middle, stop = self._at(begin), self._at(first), max(self._at(end), self._at(begin) + 1)
        middle = min(max(middle, start), stop)
        bar = " " * start + "░" * (middle - start) + "█" * (stop - middle)
        line = self._line(name, f"{bar:{self._width}}", begin, end)
        joined = f"{line}  {what}"
        return [joined] if len(joined) <= self._columns else [line, f"   {'':10} {what}"]

    @staticmethod
    def _line(name: str, bar: str, begin: float, end: float) -> str:
        return f"   {name:10} {bar} {_ms(begin):>9} to {_ms(end):>9}"

    def _at(self, seconds: float) -> int:
        return round(min(max(seconds, 0.0), self._total) / self._total * self._width) if self._total else 0


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
