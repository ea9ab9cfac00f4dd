"""Requests and answers for the tests of the handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from tests.support.stage_client import FakeContext
from trtllm_disagg.engines.recording.result import scripted_token
from trtllm_disagg.handlers.trace import ENGINE_DATA, KV_CACHE_HIT
from trtllm_disagg.strategies import STRATEGIES as SPECS
from trtllm_disagg.strategies import orders
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_request

PROMPT = [11, 12, 13]

#: Strategies with a prefill and a decode worker.
STRATEGIES = [name for name, spec in SPECS.items() if spec.is_disaggregated and spec.builder is not None]
ORDERS = [order.name for order in orders()]


def raw_request(max_tokens: int | None = 5, **keys: Any) -> dict[str, Any]:
    """A request of Dynamo's frontend, with nulls and unknown keys."""
    request: dict[str, Any] = {
        "model": "m",
        "token_ids": list(PROMPT),
        "stop_conditions": {
            "max_tokens": max_tokens,
            "stop": None,
            "ignore_eos": None,
            "max_thinking_tokens": None,
        },
        "sampling_options": {"temperature": 0.5, "top_p": None, "new_option": [1]},
        "output_options": {"logprobs": None},
        "eos_token_ids": [2],
        "annotations": [],
        "mdc_sum": "abc",
        "extra_args": {"nvext": {"anything": [1, {"deep": None}]}},
    }
    return request | keys


def request(max_tokens: int | None = 5, **keys: Any) -> GenerateRequest:
    return decode_request(raw_request(max_tokens, **keys))


def expected_tokens(count: int) -> list[int]:
    """The recording LLM's answer to PROMPT."""
    return [scripted_token(PROMPT, position) for position in range(count)]


async def collect(
    generate: Generate,
    request: GenerateRequest,
    context: RequestContext | None = None,
    into: list[TokenChunk] | None = None,
) -> list[TokenChunk]:
    """The chunks of an answer; `into` keeps those before an error."""
    seen = [] if into is None else into
    async with aclosing(generate(request, context or FakeContext())) as chunks:
        async for chunk in chunks:
            seen.append(chunk)
    return seen


def untraced(chunk: TokenChunk) -> TokenChunk:
    """The chunk without the fields that describe its making."""
    data = {
        key: value
        for key, value in (chunk.engine_data or {}).items()
        if key not in (ENGINE_DATA, KV_CACHE_HIT)
    }
    return msgspec.structs.replace(chunk, engine_data=data or None, worker_trace_link=None)


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def joined(chunks: list[TokenChunk]) -> TokenChunk:
    """One chunk of all: how an answer is cut depends on timing."""
    return msgspec.structs.replace(
        chunks[-1],
        token_ids=tokens_of(chunks),
        log_probs=[lp for chunk in chunks for lp in chunk.log_probs or ()],
        top_logprobs=[top for chunk in chunks for top in chunk.top_logprobs or ()],
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait shortly for another task."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")
