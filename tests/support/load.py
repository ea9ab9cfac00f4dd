"""Steady load on a deployment, with the outcome of every request."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.vision_models import picture
from trtllm_disagg.engines.demo_model.drawings import data_url

Body = dict[str, Any]

PAUSE_SECONDS = 0.2


def prompt_of(number: int, *, has_image: bool) -> Body:
    """A text, or a chat about an image. The chats have equally many tokens."""
    if not has_image:
        return {"prompt": f"request number {number} of several that are sent again and again"}
    image = {"type": "image_url", "image_url": {"url": data_url(picture(number))}}
    return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]}


def path_of(body: Body) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def bodies(model: str, count: int, max_tokens: int = 24, *, images: bool = False) -> list[Body]:
    """Different prompts, alternately greedy and with a seed. With `images`, half of them are chats about one."""
    return [
        {
            "model": model,
            **prompt_of(i, has_image=images and i // 2 % 2 == 1),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["worker_id", "timing", "completion_token_ids"]},
            **({"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0}),
        }
        for i in range(count)
    ]


@dataclass(slots=True)
class Load:
    """Repeats a few requests; every answer must equal the undisturbed one."""

    client: httpx.AsyncClient
    url: str
    bodies: Sequence[Body]
    expected: list[list[int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    #: The nvext of each answer inside `running`, by the index of its request in `bodies`.
    answered: list[tuple[int, Body]] = field(default_factory=list)
    #: Number of answers by first-stage instance since `learn`.
    answered_by: Counter[int] = field(default_factory=Counter)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def learn(self) -> None:
        """Record the undisturbed answers."""
        self.expected = [await self._ask(body) for body in self.bodies]
        self.answered_by.clear()

    @asynccontextmanager
    async def running(self, at_once: int) -> AsyncIterator[None]:
        """Load inside the block; waits for every request at its end."""
        stop = asyncio.Event()
        turns = itertools.cycle(range(len(self.bodies)))
        tasks = [asyncio.create_task(self._keep_asking(turns, stop)) for _ in range(at_once)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*tasks)

    async def answers(self, count: int) -> None:
        """Wait for `count` more."""
        goal = self.num_answers + count
        async with asyncio.timeout(60):
            while self.num_answers < goal:
                self._answered.clear()
                await self._answered.wait()

    async def _keep_asking(self, turns: itertools.cycle[int], stop: asyncio.Event) -> None:
        while not stop.is_set():
            index = next(turns)
            try:
                extra = await self.ask(self.bodies[index])
                self.answered.append((index, extra))
                if (tokens := extra["completion_token_ids"]) != self.expected[index]:
                    self.wrong.append(f"request {index}: {tokens} instead of {self.expected[index]}")
            except Exception as error:
                self.wrong.append(f"request {index}: {error!r}")
            self.num_answers += 1
            self._answered.set()
            # Below the machine's limit: processes start meanwhile.
            await asyncio.sleep(PAUSE_SECONDS)

    async def _ask(self, body: Body) -> list[int]:
        extra = await self.ask(body)
        tokens: list[int] = extra["completion_token_ids"]
        return tokens

    async def ask(self, body: Body) -> dict[str, Any]:
        """The answer's nvext."""
        answer = await self.client.post(self.url + path_of(body), json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")
        extra: dict[str, Any] = answer.json()["nvext"]
        self.answered_by[first_stage(extra)] += 1
        return extra


def first_stage(nvext: dict[str, Any]) -> int:
    """The instance that the frontend chose for a request."""
    instance_id: int = nvext["worker_id"]["decode_worker_id"]
    return instance_id
