"""Migration: when a worker dies, Dynamo's frontend sends its requests, with the tokens so far, to another worker."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from trtllm_disagg.errors import EngineError, InvalidRequestError
from trtllm_disagg.handlers.fallback import (
    Appended,
    MostTokens,
    Remainder,
    Replays,
    end_chunk,
    has_ended,
    max_tokens_of,
    remainder_of,
    with_seed,
)
from trtllm_disagg.streams import PerRequestStream
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk


def finish_if_budget_exhausted(generate: Generate) -> Generate:
    """`generate`; a request that lacks nothing but its finish reason is answered here. Such a request is migrated with
    `max_tokens` 0, when a worker died between its last token and its finish reason.
    """

    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if has_ended(request, []):
            request.trace.chose("local", "nothing_left")
            return _end(request, [])
        return generate(request, context)

    return answer


async def _end(request: GenerateRequest, delivered: list[int]) -> AsyncGenerator[TokenChunk, None]:
    yield end_chunk(request, delivered)


#: Prefix of our trace ids, to distinguish them from those of a tracing library.
_MARK = "7472746c6c6d6467"
_HEX = re.compile(r"[0-9a-f]{16}")
_LINK = "migration_link"


class MigrationLink(NamedTuple):
    """How a request began, for the worker that continues it after a migration.

    Dynamo appends the tokens that the client has to the prompt and subtracts them from `max_tokens`. It loses which of
    them were generated: penalties begin anew, usage counts them as prompt, and where prefill's sums differ from
    decode's another token may come. But Dynamo passes the `worker_trace_link` of the last worker's answer to the next
    worker as `migration_link` (decision 22). So each answer has the length of its prompt and its seed there.
    """

    num_prompt: int
    #: The seed that the first worker drew; 0 when the request had a seed.
    seed: int

    def encode(self) -> dict[str, str]:
        """The link in the form of W3C ids: 32 and 16 hexadecimal digits."""
        return {"trace_id": f"{_MARK}{self.seed:016x}", "span_id": f"{self.num_prompt:016x}"}

    @classmethod
    def read(cls, link: object) -> MigrationLink | None:
        """None for a link that no worker of this project has made."""
        if not isinstance(link, dict):
            return None
        trace_id, span_id = str(link.get("trace_id")), str(link.get("span_id"))
        seed = trace_id.removeprefix(_MARK)
        if not (trace_id.startswith(_MARK) and _HEX.fullmatch(seed) and _HEX.fullmatch(span_id)):
            return None
        return cls(int(span_id, 16), int(seed, 16))


def resume_migrated(
    generate: Generate, replays: Replays, most_tokens: MostTokens = max_tokens_of
) -> Generate:
    """`generate` for requests from frontends. A migrated one goes on as after any failure (`remainder_of`): one that
    `replays` accepts is run from its beginning, and the tokens that the client has are dropped; another one goes on
    behind them, and its usage is that of the whole answer. Without our link it goes on as Dynamo sends it.
    """

    def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        link = MigrationLink.read(request.raw.get(_LINK))
        asked, delivered = _before_migration(request, link) if link is not None else (request, [])
        # With several choices it is unknown which choice's tokens the client has.
        if request.phase_request is not None or request.num_choices > 1:
            return generate(request, context)
        if delivered and has_ended(asked, delivered, most_tokens):
            asked.trace.chose("local", "nothing_left")
            return _end(asked, delivered)
        had_a_seed = asked.sampling.seed is not None and (link is None or not link.seed)
        if replays(asked):
            asked = with_seed(asked)
        seed = 0 if had_a_seed else asked.sampling.seed or 0
        rest = remainder_of(asked, delivered, replays)
        chunks = generate(rest.request, context)
        if delivered:
            chunks = _new_chunks(rest, chunks)
        return _Linked(MigrationLink(len(asked.token_ids), seed).encode(), chunks)

    return answer


async def _new_chunks(
    rest: Remainder, chunks: AsyncGenerator[TokenChunk, None]
) -> AsyncGenerator[TokenChunk, None]:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                new = rest.new(chunk)
                if new is not None:
                    yield new
        except InvalidRequestError as error:
            if not isinstance(rest, Appended):
                raise
            # The request is valid: the engine refuses it with the tokens that were appended to its prompt.
            raise EngineError(f"the answer cannot be continued: {error}") from None


class _Linked(PerRequestStream[TokenChunk]):
    """Adds the link to the first chunk only, if more follow: in every chunk it would cost 0.1 kB a token."""

    def __init__(self, link: dict[str, str], chunks: AsyncGenerator[TokenChunk, None]) -> None:
        self._link = link
        self._rest = chunks

    async def _first(self) -> TokenChunk:
        assert self._rest is not None
        chunk = await anext(self._rest)
        if chunk.finish_reason is not None:
            return chunk
        return msgspec.structs.replace(chunk, worker_trace_link=self._link)


def _before_migration(request: GenerateRequest, link: MigrationLink) -> tuple[GenerateRequest, list[int]]:
    """(the request as it was before its migration, the tokens that the client has)."""
    tokens = request.token_ids
    if not 0 < link.num_prompt <= len(tokens):
        return request, []
    prompt, delivered = tokens[: link.num_prompt], tokens[link.num_prompt :]
    stop, sampling = request.stop, request.sampling
    raw = {key: value for key, value in request.raw.items() if key != _LINK} | {"token_ids": prompt}
    if stop.max_tokens is not None:
        limit = {"max_tokens": stop.max_tokens + len(delivered)}
        stop = msgspec.structs.replace(stop, **limit)
        raw["stop_conditions"] = dict(raw.get("stop_conditions") or {}) | limit
    if link.seed and sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=link.seed)
        raw["sampling_options"] = dict(raw.get("sampling_options") or {}) | {"seed": link.seed}
    return msgspec.structs.replace(
        request, raw=raw, token_ids=prompt, stop=stop, sampling=sampling
    ), delivered
