"""Runs `n` above 1 as one engine request per choice, each with its prefill, handoff and decode.

A handoff carries one choice, on TensorRT-LLM too, and is fetched once. The first choice computes the prompt. The others
then ask the same prefill worker, which finds the prompt in its prefix cache and computes their first tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from trtllm_disagg.handlers.cancellation import when_stopped
from trtllm_disagg.handlers.delivered import with_seed
from trtllm_disagg.types import (
    Choice,
    Generate,
    GenerateRequest,
    RequestContext,
    RequestTrace,
    TokenChunk,
    Usage,
)


def choices_of(request: GenerateRequest) -> dict[Choice, GenerateRequest]:
    """A request for each choice. Its seed is what one TensorRT-LLM engine would use: the request's seed plus the index
    (`LlmRequest::createChildRequest`). A missing seed is drawn, or all choices might be equal.
    """
    seed = with_seed(request).sampling.seed or 0
    first, is_computed = RequestTrace(), asyncio.Event()
    choices = [Choice(index, first, is_computed) for index in range(request.num_choices)]
    return {choice: _one(request, choice, (seed + choice.index) & (2**63 - 1)) for choice in choices}


def _one(request: GenerateRequest, choice: Choice, seed: int) -> GenerateRequest:
    own = {"n": 1, "best_of": None, "seed": seed}
    trace = RequestTrace() if choice.index else choice.first
    trace.facts["choice"] = choice.index
    return msgspec.structs.replace(
        request,
        raw=request.raw | {"sampling_options": dict(request.raw.get("sampling_options") or {}) | own},
        sampling=msgspec.structs.replace(request.sampling, **own),
        prefill_result=request.prefill_result and request.prefill_result.of_choice(choice.index),
        trace=trace,
        choice=choice,
    )


async def behind_the_first(request: GenerateRequest) -> GenerateRequest:
    """Wait until the prompt is computed and pin the request to that worker. Only further choices without a handoff
    wait.
    """
    choice = request.choice
    if choice is None or not request.is_further_choice or request.prefill_result is not None:
        return request
    await choice.prompt_is_computed.wait()
    facts = choice.first.facts
    for role, fact in (("prefill", "prefill_instance"), ("decode", "first_stage")):
        if fact in facts:
            return msgspec.structs.replace(request, pins=request.pins | {role: int(facts[fact], 16)})
    return request


class FrontendContext(RequestContext, Protocol):
    """What a frontend's request uses of Dynamo's Context besides."""

    def detached(self, id: str) -> FrontendContext: ...

    def stop_generating(self) -> None: ...


async def answer_each(
    answer: Generate, request: GenerateRequest, context: FrontendContext
) -> AsyncGenerator[TokenChunk, None]:
    """Yield the answers to all choices; each chunk has its choice's index. If one choice fails, all end with its error.
    However this ends, every choice has ended on its engine.
    """
    made: asyncio.Queue[TokenChunk | Exception | None] = asyncio.Queue()
    #: Holds one chunk: while the client is slow, each choice collects its tokens. An end waits for no reader.
    room = asyncio.Semaphore(1)

    async def read(choice: Choice, one: GenerateRequest) -> None:
        # The first choice has begun; its trace has the others.
        one = msgspec.structs.replace(one, traceparent=choice.first.root.traceparent or one.traceparent)
        try:
            async with aclosing(answer(one, contexts[choice.index])) as chunks:
                async for chunk in chunks:
                    choice.prompt_is_computed.set()
                    await room.acquire()
                    made.put_nowait(msgspec.structs.replace(chunk, index=choice.index))
        except Exception as error:
            made.put_nowait(error)
        else:
            choice.prompt_is_computed.set()
            made.put_nowait(None)

    def stop() -> None:
        for each in contexts[1:]:
            each.stop_generating()

    choices, usage = choices_of(request), _SharedUsage()
    # Dynamo fails concurrent calls to one worker with one request id.
    contexts = [context, *(context.detached(f"{context.id()}-{number}") for number in range(1, len(choices)))]
    tasks = [asyncio.create_task(read(*each), name="choice") for each in choices.items()]
    try:
        with when_stopped(context, stop):
            unfinished = len(tasks)
            while unfinished:
                new = await made.get()
                if isinstance(new, Exception):
                    raise new
                if new is None:
                    unfinished -= 1
                else:
                    room.release()
                    yield usage.of_all(new)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _SharedUsage:
    """Reports usage like one engine with all choices: the prompt counts once, with the first choice's cache hit, and
    the last chunk has the tokens of all choices.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._cached = 0

    def of_all(self, chunk: TokenChunk) -> TokenChunk:
        self._num_tokens += len(chunk.token_ids)
        usage = chunk.completion_usage
        if usage is None:
            return chunk
        if chunk.index == 0 and usage.prompt_tokens_details is not None:
            self._cached = usage.prompt_tokens_details.cached_tokens or 0
        usage = Usage.of(usage.prompt_tokens, self._num_tokens, self._cached)
        return msgspec.structs.replace(chunk, completion_usage=usage)
