"""The next turn of a conversation in prefill_first. The KV of an answer is at the decode worker that generated it, and
the next turn's prefill pulls it from there. Whatever fails here, the prefill computes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.cancellation import AbortGuard
from trtllm_disagg.handlers.decide import packed_blocks
from trtllm_disagg.handlers.local import finished
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.types import GenerateRequest, PhaseRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_chunk, encode_disaggregated_params, encode_request

log = logging.getLogger(__name__)

#: A decode worker answers between two steps of its engine.
_SECONDS = 1.0
_CACHED = PhaseRequest("cached")


class _Made(NamedTuple):
    #: The decode worker.
    instance_id: int
    #: From the start of the answer's first block.
    num_tokens: int


class PullBack:
    """On a prefill worker: which decode instance made which blocks of answers, and the question for their KV. A block
    is named by the hash of all tokens up to its end.
    """

    def __init__(self, peers: Peers, block_size: int, min_tokens: int, most_blocks: int = 1 << 15) -> None:
        """`min_tokens`: fewer tokens of an answer are computed. At most `most_blocks` are remembered: with blocks of 32
        tokens, a million tokens, in some 6 MB.
        """
        self._peers = peers
        self._size = block_size
        self._min_tokens = min_tokens
        self._most_blocks = most_blocks
        #: The block that was made longest ago is first.
        self._made: dict[bytes, _Made] = {}

    def remember(self, request: GenerateRequest, answer: list[int], instance_id: int) -> None:
        """The KV of the last token that an engine makes is never computed."""
        first = len(request.token_ids) // self._size
        for number, key in enumerate(self._keys(request.token_ids + answer[:-1], request.cache_salt)):
            if number >= first:
                self._made.pop(key, None)
                self._made[key] = _Made(instance_id, (number + 1 - first) * self._size)
        while len(self._made) > self._most_blocks:
            del self._made[next(iter(self._made))]

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> GenerateRequest:
        """The request, with a handle if a decode worker has more of its prompt. Never raises a DisaggError."""
        made = None
        # Of one token agg makes the answer, and of the prompt's logprobs every token is computed.
        if self._made and request.stop.max_tokens != 1 and request.output.prompt_logprobs is None:
            # Without the block of the last token, which has to be computed.
            for key in self._keys(request.token_ids[:-1], request.cache_salt):
                made = self._made.get(key, made)
        if made is None or made.num_tokens < self._min_tokens:
            return request
        name = f"{made.instance_id:x}"
        try:
            with request.span.child("ask_for_cached", {"instance": name}) as span:
                async with asyncio.timeout(_SECONDS):
                    handle = await self._ask(made.instance_id, request.within(span), context)
        except (DisaggError, msgspec.ValidationError, TimeoutError) as error:
            log.info("request %s: the last answer is computed, and not pulled: %r", context.id(), error)
            return request
        if handle is not None:
            request.trace.facts["kv_pulled_from"] = name
        return msgspec.structs.replace(request, pulled=handle)

    async def _ask(self, instance_id: int, request: GenerateRequest, context: RequestContext) -> bytes | None:
        params = None
        with self._peers.call_of(instance_id, request) as call:
            async with aclosing(call.answers(encode_request(request, _CACHED), context)) as answers:
                async for answer in answers:
                    params = decode_chunk(answer).disaggregated_params
        return msgspec.convert((params or {}).get("opaque_state"), bytes | None)

    def _keys(self, tokens: Sequence[int], salt: str | None) -> Iterator[bytes]:
        # The salt at a fixed length, so that it cannot be mistaken for tokens.
        hasher = hashlib.blake2b(hashlib.blake2b((salt or "").encode()).digest(), digest_size=16)
        for block in packed_blocks(tokens, self._size):
            hasher.update(block)
            yield hasher.copy().digest()


class CachedService:
    """On a decode worker: what its engine's cache has of a prompt, as a handoff under a lease. One chunk; without a
    handoff when it has nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(
        self, request: GenerateRequest, context: RequestContext
    ) -> AsyncGenerator[TokenChunk, None]:
        result = self._engine.start_cached(request)
        await finished(self._engine, result, AbortGuard(self._engine, result, context))
        params = result.outputs[0].disaggregated_params
        encoded = encode_disaggregated_params(params) if params is not None else None
        delivered = False
        try:
            yield TokenChunk([], finish_reason="length", disaggregated_params=encoded)
            delivered = not context.is_stopped()
        finally:
            if not delivered:
                self._engine.abort(result)
