"""Sends answers through Dynamo's response sender as they come; otherwise Dynamo would poll for each chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

Answer = dict[str, Any]
#: Number of an answer's chunks that buffers in between hold even if the client reads nothing. A thread sends further
#: ones, since sending may block, and chunks with alternatives per token, as large as dozens.
BUFFERED = 500
#: Number of chunks that may wait for the thread; then the answer's source waits.
WAITING = 64


class ResponseSender(Protocol):
    """Dynamo's response sender for one answer."""

    def send(self, answer: Answer, /) -> None:
        """Blocks while the buffers are full. Raises RuntimeError and stops the request if the reader is gone."""

    def close(self) -> None:
        """Complete the answer."""


async def pushed(
    answers: AsyncGenerator[Answer, None], sender: ResponseSender, is_stopped: Callable[[], bool]
) -> AsyncGenerator[Answer, None]:
    """Send all answers. Yields nothing: Dynamo asks for the first element, which runs all of this. An exception makes
    Dynamo end the answer, so the sender is not closed then. `is_stopped`: whether Dynamo has stopped the request, as it
    does if the reader is gone.
    """
    try:
        await _send_all(answers, sender)
    except RuntimeError:
        # The reader is gone. That is no error, but Dynamo would print a traceback.
        if not is_stopped():
            raise
    sender.close()
    nothing: tuple[Answer, ...] = ()
    for none in nothing:  # makes this function a generator
        yield none


async def _send_all(answers: AsyncGenerator[Answer, None], sender: ResponseSender) -> None:
    num_sent = 0
    async with aclosing(answers):
        async for answer in answers:
            if num_sent == BUFFERED or "top_logprobs" in answer:
                await _send_in_thread(answer, answers, sender)
                break
            sender.send(answer)
            num_sent += 1


async def _send_in_thread(
    first: Answer, others: AsyncGenerator[Answer, None], sender: ResponseSender
) -> None:
    with closing(_SendingThread(sender)) as thread:
        await thread.send(first)
        async for answer in others:
            await thread.send(answer)
        await thread.sent()


class _SendingThread:
    """Sends an answer's chunks in order. A daemon thread, since it may block for ever."""

    def __init__(self, sender: ResponseSender) -> None:
        self._send = sender.send
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._has_room = asyncio.Event()
        self._end: asyncio.Future[None] = self._loop.create_future()
        Thread(target=self._run, name="send", daemon=True).start()

    async def send(self, answer: Answer) -> None:
        """Queue a chunk. Raises what sending an earlier one raised."""
        if self._answers.qsize() >= WAITING:
            self._has_room.clear()
            # The thread may have emptied the queue before the clear.
            if self._answers.qsize() >= WAITING:
                await self._has_room.wait()
        if self._end.done():
            self._end.result()
        self._answers.put(answer)

    async def sent(self) -> None:
        """Wait until all chunks are sent. Raises what sending one of them raised."""
        self._answers.put(None)
        await self._end

    def close(self) -> None:
        """Let the thread end after the queued chunks."""
        self._answers.put(None)
        if not self._end.cancel() and not self._end.cancelled():
            self._end.exception()  # marks it as retrieved: another error ends the answer

    def _run(self) -> None:
        try:
            for answer in iter(self._answers.get, None):
                self._send(answer)
                if not self._has_room.is_set() and self._answers.qsize() < WAITING:
                    self._call_on_loop(self._has_room.set)
            self._call_on_loop(self._settle, None)
        except Exception as error:
            self._call_on_loop(self._settle, error)

    def _settle(self, error: Exception | None) -> None:
        self._has_room.set()
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _call_on_loop(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, *args)
