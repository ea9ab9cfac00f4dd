"""Servers to compare: one engine, or a prefill and a decode engine, on the same two cores."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.seed_scenarios import TILE, Scale

if TYPE_CHECKING:
    from trtllm_disagg.engines.embedded import LLM, SamplingParams

    #: Yields an answer's tokens as the engine makes them, each once.
    Answer = Callable[[list[int], SamplingParams], AsyncIterator[list[int]]]


class Place(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Occupancy:
    """Decides on which engine a prompt starts: knows both engines' load and the waiting prompts."""

    def __init__(self, budgets: dict[Place, int], max_batch_size: int) -> None:
        """`budgets`: prompt tokens per step of each engine. `max_batch_size`: of the decode engine."""
        self._budgets, self._max_batch_size = budgets, max_batch_size
        #: Prompt tokens that each engine has yet to compute.
        self.unfinished = dict.fromkeys(Place, 0)
        #: Requests of the decode engine, including its own prompts and those with KV still to pull.
        self.rows = 0
        self._waiting: deque[tuple[int, asyncio.Future[Place]]] = deque()

    async def place(self, num_tokens: int) -> Place:
        """Wait for an engine with room, first come first served, and start the prompt there."""
        admitted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_tokens, admitted))
        self._advance()
        return await admitted

    def place_for(self, num_tokens: int) -> Place | None:
        """The engine for a prompt; None while both are busy. Prefers prefill: there a prompt delays no running answer.

        Decode needs a free row, else the prompt would block its queue for requests that prefill hands over.
        """
        if self._has_room(Place.PREFILL, num_tokens):
            return Place.PREFILL
        if self.rows < self._max_batch_size and self._has_room(Place.DECODE, num_tokens):
            return Place.DECODE
        return None

    def start(self, place: Place, num_tokens: int) -> None:
        self.unfinished[place] += num_tokens
        self.rows += place is Place.DECODE

    def first_token(self, place: Place, num_tokens: int) -> None:
        """Note that a prompt is computed. A request on the prefill engine moves to decode now."""
        self.unfinished[place] -= num_tokens
        self.rows += place is Place.PREFILL
        self._advance()

    def last_token(self) -> None:
        self.rows -= 1
        self._advance()

    def _has_room(self, place: Place, num_tokens: int) -> bool:
        """Whether the engine has no prompt, or can compute its prompts and this one in one step."""
        unfinished = self.unfinished[place]
        return not unfinished or unfinished + num_tokens <= self._budgets[place]

    def _advance(self) -> None:
        while self._waiting:
            num_tokens, admitted = self._waiting[0]
            place = self.place_for(num_tokens)
            if place is None:
                return
            self._waiting.popleft()
            self.start(place, num_tokens)
            admitted.set_result(place)


AS_IN_THE_POST = "mono-post"
DISAGG = "disagg"
CONDITIONAL = "disagg-conditional"


@dataclass(frozen=True, slots=True)
class Server:
    answer: Answer
    engines: tuple[LLM, ...]

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()


def monolithic(llm: LLM) -> Server:
    """One engine, with prefill chunks and decode rows in the same forward pass."""

    async def answer(prompt: list[int], sampling: SamplingParams) -> AsyncIterator[list[int]]:
        result = llm.generate_async(prompt, sampling, streaming=True)
        async for _ in result:
            yield result.outputs[0].token_ids_diff

    return Server(answer, (llm,))


def disaggregated(prefill: LLM, decode: LLM) -> Server:
    """Two engines. Prefill yields the first token before any KV moves; decode continues."""
    from trtllm_disagg.engines.embedded import DisaggregatedParams

    async def answer(prompt: list[int], sampling: SamplingParams) -> AsyncIterator[list[int]]:
        only_context = DisaggregatedParams(request_type="context_only")
        first = prefill.generate_async(
            prompt, replace(sampling, max_tokens=1), disaggregated_params=only_context
        )
        await first.aresult()
        yield first.outputs[0].token_ids
        handoff = first.outputs[0].disaggregated_params
        assert handoff is not None
        handoff.request_type = "generation_only"
        result = decode.generate_async(prompt, sampling, streaming=True, disaggregated_params=handoff)
        repeated = 1
        async for _ in result:
            new = result.outputs[0].token_ids_diff
            if new[repeated:]:
                yield new[repeated:]
            repeated = max(0, repeated - len(new))

    return Server(answer, (prefill, decode))


def conditional(prefill: LLM, decode: LLM, occupancy: Occupancy) -> Server:
    """Like `disaggregated`, but when prefill is busy, decode computes a prompt itself, in chunks beside its rows."""
    servers = {Place.PREFILL: disaggregated(prefill, decode), Place.DECODE: monolithic(decode)}

    async def answer(prompt: list[int], sampling: SamplingParams) -> AsyncIterator[list[int]]:
        place = await occupancy.place(len(prompt))
        tokens_as_they_come = servers[place].answer(prompt, sampling)
        first = await anext(tokens_as_they_come)
        occupancy.first_token(place, len(prompt))
        yield first
        async for tokens in tokens_as_they_come:
            yield tokens
        occupancy.last_token()

    return Server(answer, (prefill, decode))


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings shared by all servers of one comparison."""

    model: Path
    scale: Scale
    max_batch_size: int
    transport: str
    cores: tuple[int, int]

    def engine(self, budget: int, threads: int, **more: Any) -> LLM:
        """An engine without prefix cache, so it computes every prompt. May use both cores."""
        # Imported here, since `--help` needs no engine.
        from trtllm_disagg.engines.embedded import LLM

        return LLM(
            self.model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_seq_len=self.scale.max_seq_len,
            max_batch_size=self.max_batch_size,
            max_num_tokens=budget,
            enable_chunked_prefill=True,
            kv_cache_config={"max_tokens": self.scale.pool_tokens, "enable_block_reuse": False},
            embedded={"num_threads": threads, "cpu_affinity": list(self.cores), "device": "cpu"},
            **more,
        )

    def monolithic(self, chunk: int, threads: int) -> Server:
        """One engine with a step budget of `chunk` prompt tokens and a token per decode row."""
        return monolithic(self.engine(chunk + self.max_batch_size, threads))

    def disaggregated(self) -> Server:
        return disaggregated(*self._pair(self.scale.whole_prompt))

    def conditional(self) -> Server:
        budgets = {Place.PREFILL: self.scale.whole_prompt, Place.DECODE: self.scale.local_chunk}
        pair = self._pair(self.scale.local_chunk + self.max_batch_size)
        return conditional(*pair, Occupancy(budgets, self.max_batch_size))

    def _pair(self, decode_budget: int) -> tuple[LLM, LLM]:
        """A prefill and a decode engine, one thread each."""
        transfer = {"cache_transceiver_config": {"backend": self.transport}}
        with ThreadPoolExecutor(2) as pool:
            prefill = pool.submit(self.engine, self.scale.whole_prompt, 1, **transfer)
            decode = pool.submit(self.engine, decode_budget, 1, **transfer)
        return prefill.result(), decode.result()


class Mode(NamedTuple):
    help: str
    start: Callable[[Bench], Server]


MODES = {
    AS_IN_THE_POST: Mode(
        "one engine, one thread, a prompt tile of 32 tokens a step (the post has 16), batch 4",
        lambda bench: bench.monolithic(TILE, 1),
    ),
    "mono-2t": Mode(
        "one engine, two threads, prompts in chunks beside decode rows",
        lambda bench: bench.monolithic(bench.scale.chunk, 2),
    ),
    "mono-2t-whole": Mode(
        "the same with uncut prompts", lambda bench: bench.monolithic(bench.scale.whole_prompt, 2)
    ),
    "mono-1t": Mode("one engine, one thread, chunks", lambda bench: bench.monolithic(bench.scale.chunk, 1)),
    DISAGG: Mode(
        "a prefill and a decode engine, one thread each, uncut prompts, KV moved between them",
        Bench.disaggregated,
    ),
    CONDITIONAL: Mode(
        "the same, but decode computes a prompt itself, in small chunks, when prefill is busy",
        Bench.conditional,
    ),
}
#: The modes with two engines.
DISAGGREGATED = (DISAGG, CONDITIONAL)


def start_servers(bench: Bench, modes: Sequence[str], stack: ExitStack) -> dict[str, Server]:
    """Start a server per mode; `stack` closes them."""
    servers: dict[str, Server] = {}
    for mode in modes:
        servers[mode] = MODES[mode].start(bench)
        stack.callback(servers[mode].close)
    return servers
