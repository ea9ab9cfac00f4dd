"""What a fresh client of discovery knows: nothing at first, then more bit by bit, most of it within milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any

from trtllm_disagg.runtime.handler import DESCRIBE

_DESCRIBE_SECONDS = 5.0


async def settled(
    clients: Collection[Any], enough: Callable[[Iterable[object]], bool], *, within: float, poll: float
) -> None:
    """Returns when nothing is new between two polls and `enough` (`any`, `all`) of these see somebody, or the time is
    over. Seconds.
    """
    seen: list[list[int]] = []
    for _ in range(round(within / poll)):
        now = [sorted(client.instance_ids()) for client in clients]
        if enough(now) and now == seen:
            return
        seen = now
        await asyncio.sleep(poll)


async def described(client: Any, instance_id: int) -> dict[str, Any] | None:
    """What an instance says of itself. None when it does not answer, because it is dead or no worker of ours."""
    try:
        async with asyncio.timeout(_DESCRIBE_SECONDS):
            answers = [item.data() async for item in await client.direct({DESCRIBE: True}, instance_id)]
    except Exception:
        return None
    return answers[0] if len(answers) == 1 and isinstance(answers[0], dict) else None
