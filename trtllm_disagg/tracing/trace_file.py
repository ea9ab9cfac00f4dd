"""Spans as lines of OTLP/JSON, as OpenTelemetry's collector writes them to a file: one line for each batch.

Reads what this worker, or such a collector, has written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import Event, SpanData, Value

log = logging.getLogger(__name__)

SCOPE = "trtllm_disagg"
#: When a file is as large, it takes the place of the one before it, and a new one begins: some 10000 requests each.
MAX_BYTES = 64 << 20
OLD_SUFFIX = ".1"
_SERVER, _INTERNAL, _ERROR = 2, 1, 2


class TraceFile:
    """A receiver of spans."""

    def __init__(self, path: Path, resource: Mapping[str, Value], max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._resource = {"attributes": _attributes(resource)}
        self._max_bytes = max_bytes
        self._has_failed = False

    def take(self, spans: Sequence[SpanData]) -> None:
        scope = {"scope": {"name": SCOPE}, "spans": [_encoded(span) for span in spans]}
        line = msgspec.json.encode({"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]})
        try:
            with self._path.open("ab") as file:
                file.write(line + b"\n")
                is_full = file.tell() >= self._max_bytes
            if is_full:
                self._path.replace(self._path.with_name(self._path.name + OLD_SUFFIX))
        except OSError as error:
            # A full disk is no reason to fail a request.
            if not self._has_failed:
                log.warning("%s: spans are lost: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        """Each line is written at once."""


def _encoded(span: SpanData) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        **({"parentSpanId": span.parent_id} if span.parent_id else {}),
        "name": span.name,
        "kind": _SERVER if span.is_remote else _INTERNAL,
        "startTimeUnixNano": str(span.start),
        "endTimeUnixNano": str(span.end),
        "attributes": _attributes(span.attributes),
        "events": [
            {"name": event.name, "timeUnixNano": str(event.at), "attributes": _attributes(event.attributes)}
            for event in span.events
        ],
        "status": {} if span.error is None else {"code": _ERROR, "message": span.error},
    }


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value(value)} for key, value in values.items()]


def _any_value(value: Value) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
    return {"arrayValue": {"values": [{"stringValue": each} for each in value]}}


@dataclass(slots=True)
class ReadSpan:
    """One span of a file, and of which process it is."""

    data: SpanData
    resource: dict[str, Value] = field(default_factory=dict)
    scope: str = ""


def read_spans(path: Path) -> Iterator[ReadSpan]:
    """Raises ConfigError for a file that has no OTLP in it. The last line may be half written, and is left out."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError.bad_value(
            "traces", str(path), f"a file that can be read ({error.strerror})"
        ) from None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield from _decoded(msgspec.json.decode(line))
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
            if number == len(lines) and not text.endswith(b"\n"):
                return
            allowed = f"lines of OTLP/JSON, each with resourceSpans; line {number} is none ({error!r})"
            raise ConfigError.bad_value("traces", str(path), allowed) from None


def _decoded(batch: dict[str, Any]) -> Iterator[ReadSpan]:
    for of_resource in batch["resourceSpans"]:
        resource = _read_attributes(of_resource.get("resource") or {})
        for of_scope in of_resource.get("scopeSpans") or ():
            scope = str((of_scope.get("scope") or {}).get("name", ""))
            for span in of_scope.get("spans") or ():
                yield ReadSpan(_read(span), resource, scope)


def _read(span: dict[str, Any]) -> SpanData:
    status = span.get("status") or {}
    return SpanData(
        name=str(span["name"]),
        trace_id=str(span["traceId"]).lower(),
        span_id=str(span["spanId"]).lower(),
        parent_id=str(span.get("parentSpanId") or "").lower() or None,
        start=int(span["startTimeUnixNano"]),
        end=int(span["endTimeUnixNano"]),
        attributes=_read_attributes(span),
        events=[
            Event(str(event["name"]), int(event["timeUnixNano"]), _read_attributes(event))
            for event in span.get("events") or ()
        ],
        # The collector's files have the number, other writers the name.
        error=str(status.get("message", "")) if status.get("code") in (_ERROR, "STATUS_CODE_ERROR") else None,
        is_remote=span.get("kind") in (_SERVER, "SPAN_KIND_SERVER"),
    )


def _read_attributes(holder: dict[str, Any]) -> dict[str, Value]:
    return {each["key"]: _read_value(each.get("value") or {}) for each in holder.get("attributes") or ()}


def _read_value(value: dict[str, Any]) -> Value:
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)
        if kind == "boolValue":
            return bool(content)
        if kind == "arrayValue":
            return [str(_read_value(each)) for each in content.get("values") or ()]
        return str(content)
    return ""
