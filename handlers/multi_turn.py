"""The next turn of a conversation in prefill_first. The KV of an answer is at the decode worker that generated it, so
the next turn's prefill pulls it from there instead of computing it. Whatever fails here, the prefill computes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import DisaggError, PeerUnavailableError
from trtllm_disagg.handlers.cancellation import AbortGuard
from trtllm_disagg.handlers.local import finished
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.types import GenerateRequest, PhaseRequest, RequestContext, TokenChunk
from trtllm_disagg.wire.bodies import decode_chunk, encode_disaggregated_params
from trtllm_disagg.wire.handoff_protocols import HandoffProtocol

log = logging.getLogger(__name__)

#: A decode worker answers between two steps of its engine.
_SECONDS = 1.0
#: Blocks of answers that are remembered: a million tokens in blocks of 32.
_REMEMBERED = 1 << 15
_CACHED = PhaseRequest("cached")


class Made(NamedTuple):
    """The last known block of a prompt: the decode instance that made it, and the tokens from the answer's first block
    to this one's end.
    """

    instance_id: int
    num_tokens: int


class Answers:
    """Which decode instance made which blocks of answers. A block is named by the hash of all tokens up to its end."""

    def __init__(self, block_size: int, most: int = _REMEMBERED) -> None:
        self._size = block_size
        self._most = most
        #: The one that was made or found longest ago is first.
        self._made: dict[bytes, Made] = {}

    def __len__(self) -> int:
        return len(self._made)

    def add(self, prompt: list[int], answer: list[int], salt: str | None, instance_id: int) -> None:
        """The KV of the answer's last token was never computed."""
        first = len(prompt) // self._size
        for number, key in enumerate(self._keys(prompt + answer[:-1], salt)):
            if number >= first:
                self._made.pop(key, None)
                self._made[key] = Made(instance_id, (number + 1 - first) * self._size)
        while len(self._made) > self._most:
            del self._made[next(iter(self._made))]

    def last_block(self, prompt: list[int], salt: str | None) -> Made | None:
        """Of those in the prompt; the block of its last token, which has to be computed, does not count."""
        found = None
        for key in self._keys(prompt[:-1], salt) if self._made else ():
            found = self._made.get(key, found)
        return found

    def forget(self, prompt: list[int], salt: str | None) -> None:
        """Its instance has them no longer."""
        for key in self._keys(prompt, salt):
            self._made.pop(key, None)

    def _keys(self, tokens: Sequence[int], salt: str | None) -> Iterator[bytes]:
        # The salt at a fixed length, so that it cannot be mistaken for tokens.
        hasher = hashlib.blake2b(hashlib.blake2b((salt or "").encode()).digest(), digest_size=16)
        packed = array("q", tokens).tobytes()
        width = self._size * 8
        for at in range(0, len(packed) - width + 1, width):
            hasher.update(packed[at : at + width])
            yield hasher.copy().digest()


class PullBack:
    """On a prefill worker: remembers what decode workers have generated, and asks for the KV of it."""

    def __init__(self, peers: Peers, protocol: HandoffProtocol, block_size: int, min_tokens: int) -> None:
        """`min_tokens`: fewer tokens of an answer are computed."""
        self._peers = peers
        self._protocol = protocol
        self._min_tokens = min_tokens
        self.answers = Answers(block_size)

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> bytes | None:
        """A handle of the start of the prompt in a decode engine's cache; None where there is none to pull."""
        prompt, salt = request.token_ids, request.cache_salt
        made = self.answers.last_block(prompt, salt)
        if made is None or made.num_tokens < self._min_tokens or request.output.prompt_logprobs is not None:
            return None
        handle = None
        try:
            with request.span.child("ask_for_cached", {"instance": f"{made.instance_id:x}"}) as span:
                async with asyncio.timeout(_SECONDS):
                    handle = await self._ask(made.instance_id, request.within(span), context)
        except (DisaggError, TimeoutError) as error:
            log.info("request %s: the answer before it is computed, not pulled: %s", context.id(), error)
        if handle is None:
            self.answers.forget(prompt, salt)
        else:
            request.trace.facts["kv_pulled_from"] = f"{made.instance_id:x}"
        return handle

    async def _ask(self, instance_id: int, request: GenerateRequest, context: RequestContext) -> bytes | None:
        handle = None
        with self._peers.call_of(instance_id, request) as call:
            async with aclosing(call.answers(self._protocol.encode(request, _CACHED), context)) as answers:
                async for answer in answers:
                    params = decode_chunk(answer).disaggregated_params or {}
                    try:
                        handle = msgspec.convert(params.get("opaque_state"), bytes | None)
                    except msgspec.ValidationError as error:
                        raise PeerUnavailableError(f"the handle is unreadable: {error}") from None
        return handle


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
