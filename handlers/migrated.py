"""A request that the frontend has taken from a worker that died, and that goes on here.

Dynamo appends the tokens that the client has to the prompt and takes them from `max_tokens`. That forgets which of them
were generated: penalties begin anew, usage counts them as prompt, and where prefill's sums differ from decode's another
token may come. Dynamo does not say where the prompt ends, but it returns to the next worker what the last one has put
into `worker_trace_link`, as `migration_link` (decision 22). So each answer says there how long its prompt is, and which
seed it was given.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from trtllm_disagg.handlers.resume import Replays, has_ended, repeatable, rest_of, the_end
from trtllm_disagg.types import Generate, GenerateRequest, RequestContext, TokenChunk

#: Tells our links from those of a tracing library.
_MARK = "7472746c6c6d6467"
_HEX = re.compile(r"[0-9a-f]{16}")
_LINK = "migration_link"


class Start(NamedTuple):
    """How a request began, as its answer tells it to whatever worker goes on with it."""

    num_prompt: int
    #: That it was given because it had none; 0 when it had one.
    seed: int

    def as_link(self) -> dict[str, str]:
        """As W3C ids look: 32 and 16 hexadecimal digits."""
        return {"trace_id": f"{_MARK}{self.seed:016x}", "span_id": f"{self.num_prompt:016x}"}

    @classmethod
    def read(cls, link: Any) -> Start | None:
        """None for what is no link of ours."""
        if not isinstance(link, dict):
            return None
        trace_id, span_id = str(link.get("trace_id")), str(link.get("span_id"))
        seed = trace_id.removeprefix(_MARK)
        if not (trace_id.startswith(_MARK) and _HEX.fullmatch(seed) and _HEX.fullmatch(span_id)):
            return None
        return cls(int(span_id, 16), int(seed, 16))


def going_on(generate: Generate, replays: Replays) -> Generate:
    """`generate`, for requests from frontends; what was migrated is given once more, without what the client has.

    `replays` says of which requests; the others go on as Dynamo has them.
    """

    async def answer(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        start = Start.read(request.raw.get(_LINK))
        asked, delivered = _as_it_began(request, start) if start is not None else (request, [])
        if request.errand is not None or not replays(asked):
            async with aclosing(generate(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        if delivered and has_ended(asked, delivered):
            asked.journey.chose("local", "nothing_left")
            yield the_end(asked, delivered)
            return
        had_a_seed = asked.sampling.seed is not None and (start is None or not start.seed)
        asked = repeatable(asked)
        seed = 0 if had_a_seed else asked.sampling.seed or 0
        link: dict[str, str] | None = Start(len(asked.token_ids), seed).as_link()
        rest = rest_of(asked, delivered, replays)
        async with aclosing(generate(rest.request, context)) as chunks:
            async for chunk in chunks:
                new = rest.new(chunk)
                if new is not None:
                    # Once is enough, and in each chunk it would cost 0.1 kB a token.
                    yield new if link is None else msgspec.structs.replace(new, worker_trace_link=link)
                    link = None

    return answer


def _as_it_began(request: GenerateRequest, start: Start) -> tuple[GenerateRequest, list[int]]:
    """The request before it was migrated, and the tokens that the client has."""
    tokens = request.token_ids
    if not 0 < start.num_prompt <= len(tokens):
        return request, []
    prompt, delivered = tokens[: start.num_prompt], tokens[start.num_prompt :]
    stop, sampling = request.stop, request.sampling
    raw = {key: value for key, value in request.raw.items() if key != _LINK} | {"token_ids": prompt}
    if stop.max_tokens is not None:
        limit = {"max_tokens": stop.max_tokens + len(delivered)}
        stop = msgspec.structs.replace(stop, **limit)
        raw["stop_conditions"] = dict(raw.get("stop_conditions") or {}) | limit
    if start.seed and sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=start.seed)
        raw["sampling_options"] = dict(raw.get("sampling_options") or {}) | {"seed": start.seed}
    return replace(request, raw=raw, token_ids=prompt, stop=stop, sampling=sampling), delivered
