"""Pulls an answer's KV from decode to prefill for a conversation's next turn (prefill_first). The decode worker runs
context_only of prompt and answer, which it has cached; the prefill worker fetches that handoff with generation_only of
one token, and its cache keeps the blocks. If the pull fails, the next prefill computes the answer.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import DisaggError
from trtllm_disagg.handlers.cached_prefix import CachedPrefixes
from trtllm_disagg.handlers.drain import in_background
from trtllm_disagg.handlers.local import fetch
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.recall import Recalls
from trtllm_disagg.handlers.remote import RemotePrefill
from trtllm_disagg.types import GenerateRequest, Handoff, PrefillPhase, RequestContext, TokenChunk

log = logging.getLogger(__name__)

#: Seconds that a next turn waits for a running pull.
_WAIT_SECONDS = 1.0
#: Pulls at once; the next prefill computes the other answers.
_MAX_PULLS = 64


class NextTurns:
    """Prepares nothing for the conversations' next turns."""

    def answered(self, request: GenerateRequest, answer: list[int]) -> None:
        """The client has this answer."""

    async def ready(self, request: GenerateRequest) -> None:
        """Wait for a running pull of the prompt's start."""


class PullBack(NextTurns):
    """On a prefill worker: caches the answers that decode workers generated for its requests."""

    def __init__(
        self, peers: Peers, prefill: RemotePrefill, engine: Engine, block_size: int, min_tokens: int
    ) -> None:
        """`prefill` runs on one of `peers`, decode workers. Pulls answers of at least `min_tokens`, in full blocks."""
        self._peers = peers
        self._prefill = prefill
        self._engine = engine
        self._size = block_size
        self._min_tokens = min_tokens
        self._running: dict[asyncio.Task[object], GenerateRequest] = {}

    def answered(self, request: GenerateRequest, answer: list[int]) -> None:
        """A worker's request is skipped: its next turn goes to that worker."""
        tokens, size = request.token_ids + answer, self._size
        # Decode lacks the last token's KV.
        count = (len(tokens) - 1) // size * size
        decode = int(request.trace.facts.get("decode_instance", "0"), 16)
        callable_ids = set(self._peers.instance_ids()) - self._peers.breaker.open()
        if (
            count - len(request.token_ids) // size * size >= self._min_tokens
            and request.phase_request is None
            and request.images is None
            and decode in callable_ids
            and len(self._running) < _MAX_PULLS
        ):
            # An engine computes a prompt's last token, so it must follow the blocks that decode has.
            pulled = request.with_tokens(tokens[: count + 1])
            pulled = msgspec.structs.replace(pulled, avoid=frozenset(callable_ids - {decode}), choice=None)
            task = in_background(self._pull(pulled), "pull of an answer")
            self._running[task] = pulled
            task.add_done_callback(self._running.pop)

    async def ready(self, request: GenerateRequest) -> None:
        for task, pulled in list(self._running.items()):
            if pulled.cache_salt == request.cache_salt and _begins_with(request.token_ids, pulled.token_ids):
                with request.span.child("wait_for_answer"):
                    await asyncio.wait((task,), timeout=_WAIT_SECONDS)

    async def _pull(self, request: GenerateRequest) -> None:
        try:
            handoff = await self._prefill(request, None)
            if not handoff.is_final:
                try:
                    await fetch(self._engine, request.only_fetching(handoff))
                    handoff.decode_has_it()
                finally:
                    handoff.release()
        except DisaggError as error:
            log.info(
                "an answer of %d tokens with its prompt stays at decode: %s", len(request.token_ids), error
            )


def _begins_with(tokens: list[int], start: list[int]) -> bool:
    count = len(start)
    return tokens[count - 1 : count] == start[-1:] and tokens[:count] == start


#: The number of handoffs that a decode worker holds or makes for pulls at once.
_MAX_UNTAKEN = 32
#: Blocks that a decode worker may have to compute, since the newest ones' events are late.
_MAX_COMPUTED = 2
#: Seconds that a pull waits for the events of an answer that has just ended.
_LOOKS, _LOOK_SECONDS = 15, 0.02


class PrefillOfCached:
    """On a decode worker: runs context_only of cached prompts. Others get a final, empty handoff, which delays no
    answer.
    """

    def __init__(self, prefill: PrefillPhase, cached: CachedPrefixes, recalls: Recalls) -> None:
        """`cached` follows the engine's KV events; without events nothing counts as cached."""
        self._prefill = prefill
        self._cached = cached
        self._recalls = recalls

    async def __call__(self, request: GenerateRequest, context: RequestContext) -> Handoff:
        if self._recalls.num_untaken <= _MAX_UNTAKEN:
            for _ in range(_LOOKS):
                num_cached = self._cached.num_cached(request.token_ids, request.cache_salt)
                if len(request.token_ids) - num_cached <= _MAX_COMPUTED * self._cached.block_size:
                    return await self._prefill(request, context)
                await asyncio.sleep(_LOOK_SECONDS)
        return Handoff(TokenChunk([], finish_reason="length"), None)
