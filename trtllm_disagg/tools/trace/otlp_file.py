"""Reads files of OTLP/JSON lines: a worker's trace file, or another program's."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import SpanData, SpanEvent, Value

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadSpan:
    """One span of a file, with the attributes of its process."""

    data: SpanData
    resource: dict[str, Value] = field(default_factory=dict)
    scope: str = ""


#: Includes ESC, but not tabs and line ends.
_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}
#: Errors of `_decoded`, and of its JSON.
_NO_OTLP = (msgspec.MsgspecError, RecursionError, KeyError, TypeError, ValueError, AttributeError)


def read_spans(path: Path) -> Iterator[ReadSpan]:
    """Raises ConfigError for a file without OTLP/JSON. Skips an unfinished last line; warns of other bad lines."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError.bad_value("trace file", str(path), f"a readable file ({error.strerror})") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    refused: list[ConfigError] = []
    for number, line in lines:
        try:
            yield from [*_decoded(msgspec.json.decode(line))]
        except _NO_OTLP as error:
            if number < lines[-1][0] or text.endswith(b"\n"):
                allowed = f"lines of OTLP/JSON, each with resourceSpans; line {number} is not ({error!r})"
                refused.append(ConfigError.bad_value("trace file", str(path), allowed))
    if refused and len(refused) == len(lines):
        raise refused[0]
    if refused:
        log.warning("skipping %d of %d lines: %s", len(refused), len(lines), refused[0])


def _decoded(batch: dict[str, Any]) -> Iterator[ReadSpan]:
    for of_resource in batch["resourceSpans"]:
        resource = _read_attributes(of_resource.get("resource") or {})
        for of_scope in of_resource.get("scopeSpans") or ():
            scope = _text((of_scope.get("scope") or {}).get("name", ""))
            for span in of_scope.get("spans") or ():
                yield ReadSpan(_read(span), resource, scope)


def _read(span: dict[str, Any]) -> SpanData:
    status = span.get("status") or {}
    return SpanData(
        name=_text(span["name"]),
        trace_id=_text(span["traceId"]).lower(),
        span_id=_text(span["spanId"]).lower(),
        parent_id=_text(span.get("parentSpanId") or "").lower() or None,
        start=_time(span["startTimeUnixNano"]),
        end=_time(span["endTimeUnixNano"]),
        attributes=_read_attributes(span),
        events=[
            SpanEvent(_text(event["name"]), _time(event["timeUnixNano"]), _read_attributes(event))
            for event in span.get("events") or ()
        ],
        # The collector writes the number, other programs the name.
        error=_text(status.get("message", "")) if status.get("code") in (2, "STATUS_CODE_ERROR") else None,
        is_remote=span.get("kind") in (2, "SPAN_KIND_SERVER"),
    )


def _text(value: object) -> str:
    """Without terminal control characters: a file may come from another program."""
    return str(value).translate(_CONTROL)


def _time(value: Any) -> int:
    """Raises ValueError unless it is a 64-bit number of nanoseconds."""
    at = int(value)
    if at >> 64:
        raise ValueError("a time beyond 64 bits")
    return at


def _read_attributes(holder: dict[str, Any]) -> dict[str, Value]:
    return {
        _text(each["key"]): _read_value(each.get("value") or {}) for each in holder.get("attributes") or ()
    }


def _read_value(value: dict[str, Any]) -> Value:
    for key, content in value.items():
        if key == "arrayValue":
            return [str(_read_value(each)) for each in content.get("values") or ()]
        return _READ.get(key, _text)(content)
    return ""


def _read_double(content: Any) -> float | str:
    """Infinity and NaN as text, since JSON has no number for them."""
    number = float(content)
    return number if math.isfinite(number) else str(number)


_READ: dict[str, Callable[[Any], str | bool | int | float]] = {
    "intValue": int,
    "doubleValue": _read_double,
    "boolValue": bool,
}
