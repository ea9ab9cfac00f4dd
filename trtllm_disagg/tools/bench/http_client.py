"""An HTTP client with little cost of its own: it records bytes and two times, and parses them after the round."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_disagg.errors import DisaggError

_OK = b"HTTP/1.1 200"
_EVENT = b"data: "
#: With the end of what is before it: a header may end in 0.
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ANSWER_SECONDS = 600.0


class BadAnswerError(DisaggError):
    """The server's answer is not a complete stream of completions."""


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed completion; times are seconds of `time.perf_counter`."""

    asked: float
    first: float = 0.0
    ended: float = 0.0
    raw: bytearray = field(default_factory=bytearray)

    @property
    def is_refused(self) -> bool:
        """Whether the status, as far as it has arrived, is another than 200."""
        return not self.raw.startswith(_OK[: len(self.raw)])

    @property
    def is_refused_whole(self) -> bool:
        """Whether a refusal has arrived with its reason, of which the header has the length."""
        head, end, body = bytes(self.raw).partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        return self.is_refused and bool(end) and (length is None or len(body) >= int(length[1]))

    def refusal(self) -> BadAnswerError:
        head, _, body = bytes(self.raw).partition(b"\r\n\r\n")
        return BadAnswerError(f"{head[:40]!r}: {body[:200]!r}")

    def events(self) -> list[dict[str, Any]]:
        """The events of the answer. Raises BadAnswerError unless it is a complete stream."""
        if self.is_refused:
            raise self.refusal()
        _, _, body = bytes(self.raw).partition(b"\r\n\r\n")
        lines = [line for line in _unchunked(body).split(b"\n") if line.startswith(_EVENT)]
        if not lines or lines[-1] != _EVENT + b"[DONE]":
            raise BadAnswerError(f"the stream has no end: {body[-200:]!r}")
        return [json.loads(line.removeprefix(_EVENT)) for line in lines[:-1]]

    def text(self) -> str:
        return "".join(choice["text"] for event in self.events() for choice in event["choices"])


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        parts.append(rest[:length])
        body = rest[length + 2 :]
    return b"".join(parts)


class Connection(asyncio.Protocol):
    """One connection that stays open; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer = StreamedAnswer(0.0)
        #: Ends with the answer to the last request.
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done.set_result(None)

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._acknowledge_at_once()
        answer = self._answer
        answer.raw += data
        if not answer.first and _EVENT in answer.raw:
            answer.first = now
        # A refusal is no stream: it has another end.
        if answer.is_refused_whole or answer.raw.endswith(_LAST_CHUNK):
            answer.ended = now
            if not self._done.done():
                self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done.done():
            return
        if self._answer.is_refused:
            self._done.set_result(None)
        else:
            self._done.set_exception(BadAnswerError(f"the server hung up: {error}"))

    def _acknowledge_at_once(self) -> None:
        """Otherwise the kernel delays the acknowledgement, and the server its last packet, by up to 40 ms."""
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    async def ask(self, request: bytes, seconds: float = _ANSWER_SECONDS) -> StreamedAnswer:
        """Raises BadAnswerError if the server refuses the request, hangs up, or has not answered after `seconds`."""
        if self._transport.is_closing():
            raise BadAnswerError("the server hung up before the request")
        self._done = asyncio.get_running_loop().create_future()
        answer = self._answer = StreamedAnswer(time.perf_counter())
        self._transport.write(request)
        try:
            async with asyncio.timeout(seconds):
                await self._done
        except TimeoutError as error:
            # What still arrives belongs to no later request.
            self.close()
            raise BadAnswerError(
                f"no whole answer after {seconds:g} s: {bytes(answer.raw[-200:])!r}"
            ) from error
        if answer.is_refused:
            self.close()
            raise answer.refusal()
        return answer

    def close(self) -> None:
        self._transport.close()


def completion_request(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """POST /v1/completions, streamed. No token of the recording engine ends an answer early."""
    asked = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "stream": True}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask_all(connections: Sequence[Connection], requests: Sequence[bytes]) -> list[StreamedAnswer]:
    """Sends as many requests at a time as there are connections. The answers are in the order in which they ended."""
    waiting = iter(requests)
    answers: list[StreamedAnswer] = []

    async def keep_asking(connection: Connection) -> None:
        for request in waiting:
            answers.append(await connection.ask(request))

    await asyncio.gather(*(keep_asking(connection) for connection in connections))
    return answers
