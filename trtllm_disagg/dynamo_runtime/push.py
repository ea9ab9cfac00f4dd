"""Answers that are given to Dynamo as they come. To be asked for each chunk costs this process several times as much.

That slowness has its use where an engine is: what its engine gives meanwhile is the next chunk (`handlers.local`), and
without it there would be a chunk for each token. So only workers push that have no tokens of their own to put together.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Protocol

#: So many chunks of an answer find room on their way, however little its client reads. Sending more may have to wait,
#: which the event loop must not: a thread does it. A chunk with alternatives for each token is as large as dozens.
BUFFERED = 500


class ResponseSender(Protocol):
    """Dynamo's, of one answer."""

    def send(self, answer: dict[str, Any], /) -> None:
        """Blocks while those before it find no room. Raises when the reader is gone."""
        ...

    def close(self) -> None:
        """The answer is whole."""
        ...


async def pushed(
    answers: AsyncGenerator[dict[str, Any], None], sender: ResponseSender
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields nothing: Dynamo asks for the first element only, to have all of this run. An error ends the answer when
    it leaves here; nothing is closed then.
    """
    num_sent = 0
    async with aclosing(answers):
        async for answer in answers:
            num_sent += 1
            if num_sent > BUFFERED or "top_logprobs" in answer:
                await _send_in_thread(sender, answer)
            else:
                sender.send(answer)
    sender.close()
    nothing: tuple[dict[str, Any], ...] = ()
    for none in nothing:
        yield none


async def _send_in_thread(sender: ResponseSender, answer: dict[str, Any]) -> None:
    """A thread of its own, that a worker does not wait for at its end: it may wait for ever."""
    loop = asyncio.get_running_loop()
    sent: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if sent.done():
            return  # cancelled
        if error is None:
            sent.set_result(None)
        else:
            sent.set_exception(error)

    def send() -> None:
        error = None
        try:
            sender.send(answer)
        except Exception as failed:
            error = failed
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=send, name="send", daemon=True).start()
    await sent
