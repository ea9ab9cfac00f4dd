"""A cheap client for streamed completions: it keeps bytes and two times, and parses them after the round."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, TCPConnector

from trtllm_disagg.errors import DisaggError
from trtllm_disagg.tools.up.http import session

_EVENT = b"data: "
_ANSWER_SECONDS = 600.0


class BadAnswerError(DisaggError):
    """The server's answer is not a complete stream of completions."""


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed completion; times are seconds of `time.perf_counter`."""

    asked: float
    first: float = 0.0
    ended: float = 0.0
    body: bytearray = field(default_factory=bytearray)

    def events(self) -> list[dict[str, Any]]:
        """The answer's events. Raises BadAnswerError if the stream is incomplete."""
        lines = [line for line in bytes(self.body).split(b"\n") if line.startswith(_EVENT)]
        if not lines or lines[-1] != _EVENT + b"[DONE]":
            raise BadAnswerError(f"the stream has no end: {bytes(self.body[-200:])!r}")
        return [json.loads(line.removeprefix(_EVENT)) for line in lines[:-1]]

    def text(self) -> str:
        return "".join(choice["text"] for event in self.events() for choice in event["choices"])


@dataclass(frozen=True, slots=True)
class Client:
    """Connections to a frontend that stay open."""

    url: str
    _session: ClientSession

    @classmethod
    @asynccontextmanager
    async def to(cls, url: str) -> AsyncIterator[Client]:
        async with session(url, connector=TCPConnector(limit=0, keepalive_timeout=_ANSWER_SECONDS)) as client:
            yield cls(url, client)

    async def ask(self, request: dict[str, Any], seconds: float = _ANSWER_SECONDS) -> StreamedAnswer:
        """Raises BadAnswerError if the server refuses the request, hangs up, or takes more than `seconds`."""
        answer = StreamedAnswer(time.perf_counter())
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.post(f"{self.url}/v1/completions", json=request) as response,
            ):
                await _read(response, answer)
        except TimeoutError as error:
            why = f"no complete answer after {seconds:g} s: {bytes(answer.body[-200:])!r}"
            raise BadAnswerError(why) from error
        except ClientError as error:
            raise BadAnswerError(f"the server hung up: {error}") from error
        if response.status != 200:
            raise BadAnswerError(f"{response.status} {response.reason}: {bytes(answer.body[:200])!r}")
        return answer

    async def ask_all(self, requests: Sequence[dict[str, Any]], concurrency: int = 1) -> list[StreamedAnswer]:
        """Send all requests, at most `concurrency` at a time. Returns answers in the order of their ends."""
        waiting = iter(requests)
        answers: list[StreamedAnswer] = []

        async def keep_asking() -> None:
            for request in waiting:
                answers.append(await self.ask(request))

        await asyncio.gather(*(keep_asking() for _ in range(concurrency)))
        return answers


async def _read(response: ClientResponse, answer: StreamedAnswer) -> None:
    async for part in response.content.iter_any():
        answer.ended = time.perf_counter()
        if response.connection is not None and response.connection.transport is not None:
            # Else the kernel delays its acknowledgement, and so the server its last packet, by up to 40 ms.
            client = response.connection.transport.get_extra_info("socket")
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        answer.body += part
        if not answer.first and _EVENT in answer.body:
            answer.first = answer.ended


def completion_request(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Body of a streamed POST /v1/completions. The recording engine generates no end token before max_tokens."""
    return {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "stream": True}
