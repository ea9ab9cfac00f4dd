"""Answers that a worker sends through Dynamo's sender as they come, where Dynamo would ask for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, closing, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

Answer = dict[str, Any]
#: So many chunks of an answer find room on their way, however little its client reads. Sending more may have to wait,
#: which the event loop must not: a thread does it. A chunk with alternatives for each token is as large as dozens.
BUFFERED = 500
#: The thread is given so many chunks before it has sent them; then the answer's source waits.
WAITING = 64


class ResponseSender(Protocol):
    """Dynamo's, of one answer."""

    def send(self, answer: Answer, /) -> None:
        """Blocks while those before it find no room. Raises when the reader is gone."""
        ...

    def close(self) -> None:
        """The answer is whole."""
        ...


async def pushed(
    answers: AsyncGenerator[Answer, None], sender: ResponseSender
) -> AsyncGenerator[Answer, None]:
    """Yields nothing: Dynamo asks for the first element only, to have all of this run. An error ends the answer when
    it leaves here; nothing is closed then.
    """
    num_sent = 0
    async with aclosing(answers):
        async for answer in answers:
            if num_sent == BUFFERED or "top_logprobs" in answer:
                await _send_in_thread(answer, answers, sender)
                break
            sender.send(answer)
            num_sent += 1
    sender.close()
    nothing: tuple[Answer, ...] = ()
    for none in nothing:
        yield none


async def _send_in_thread(first: Answer, rest: AsyncGenerator[Answer, None], sender: ResponseSender) -> None:
    with closing(_SendingThread(sender)) as thread:
        await thread.send(first)
        async for answer in rest:
            await thread.send(answer)
        await thread.sent()


class _SendingThread:
    """Sends an answer's chunks in their order. A worker does not wait for it at its end: it may be blocked for ever."""

    def __init__(self, sender: ResponseSender) -> None:
        self._send = sender.send
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._has_room = asyncio.Event()
        self._end: asyncio.Future[None] = self._loop.create_future()
        Thread(target=self._run, name="send", daemon=True).start()

    async def send(self, answer: Answer) -> None:
        """Raises what sending an earlier one raised."""
        if self._answers.qsize() >= WAITING:
            self._has_room.clear()
            # The thread may have sent the last one before it could see that.
            if self._answers.qsize() >= WAITING:
                await self._has_room.wait()
        if self._end.done():
            self._end.result()
        self._answers.put(answer)

    async def sent(self) -> None:
        """All are. Raises what sending one of them raised."""
        self._answers.put(None)
        await self._end

    def close(self) -> None:
        """Nothing more is sent than what was given."""
        self._answers.put(None)
        if not self._end.cancel() and not self._end.cancelled():
            self._end.exception()  # seen: another error ends the answer

    def _run(self) -> None:
        try:
            for answer in iter(self._answers.get, None):
                self._send(answer)
                if not self._has_room.is_set() and self._answers.qsize() < WAITING:
                    self._tell(self._has_room.set)
            self._tell(self._settle, None)
        except Exception as error:
            self._tell(self._settle, error)

    def _settle(self, error: Exception | None) -> None:
        self._has_room.set()
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, *args)
