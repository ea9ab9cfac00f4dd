"""Random requests through two engines with too little room: handoffs of both schedule styles, cancelled anywhere.

By hand: `python -m tests.support.storm MODEL FIRST_SEED NUM_SEEDS`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.replay import Replay
from trtllm_disagg.engines.embedded import (
    LLM,
    DisaggregatedParams,
    DisaggScheduleStyle,
    RequestError,
    SamplingParams,
)

BLOCK = 16
NUM_BLOCKS = 24
LONGEST = 190
#: Seconds for which an abandoned handoff holds blocks that others wait for.
LEASE_SECONDS = 2.0
_SETTLE_SECONDS = 30.0
_STEMS = [[2 + (salt * 41 + i * 7 + i * i) % 250 for i in range(LONGEST)] for salt in range(3)]
_FIRST_ID = 1 << 42


def start(model: Path, backend: str, **more: Any) -> LLM:
    """An engine with room for two or three requests, with preemption, chunks, and all reuse."""
    kv_cache = {
        "max_tokens": NUM_BLOCKS * BLOCK,
        "tokens_per_block": BLOCK,
        "event_buffer_max_size": 100_000,
        "enable_partial_reuse": True,
    }
    settings: dict[str, Any] = {
        "kv_cache_config": kv_cache,
        "cache_transceiver_config": {"backend": backend, "kv_transfer_timeout_ms": int(LEASE_SECONDS * 1000)},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "enable_chunked_prefill": True,
        "max_num_tokens": 64,
        "max_seq_len": 256,
        "max_batch_size": 6,
        "enable_iter_perf_stats": True,
    }
    return LLM(model, **(settings | more))


class Storm:
    """`answers`: those of undisturbed requests, by prompt and sampling; each is requested repeatedly."""

    def __init__(self, prefill: LLM, decode: LLM, seed: int, replays: tuple[Replay, Replay]) -> None:
        self._replays = replays
        self._prefill = prefill
        self._decode = decode
        self._seed = seed
        self.seen: Counter[str] = Counter()
        self._wanted: list[tuple[list[int], SamplingParams, list[int]]] = []

    async def blow(self, num_requests: int) -> None:
        gate = asyncio.Semaphore(10)

        async def one(number: int) -> None:
            dice = random.Random(self._seed * 1000 + number)
            async with gate:
                await self._request(dice, number)

        await asyncio.gather(*(one(number) for number in range(num_requests)))

    async def check(self) -> None:
        """All blocks are free, events are consistent, and every answer equals a single engine's."""
        for llm, replay in zip((self._prefill, self._decode), self._replays, strict=True):
            stats = llm.get_stats()
            self.seen["paused"] += sum(
                each["inflightBatchingStats"]["numPausedRequests"] > 0 for each in stats
            )
            self.seen["reused"] += max((each["kvCacheStats"]["reusedBlocks"] for each in stats), default=0)
            await _settle(llm)
            replay.apply(llm.get_kv_cache_events())
            assert len(replay.known) <= NUM_BLOCKS
        for prompt, params, tokens in self._wanted:
            alone = await self._prefill.generate_async(prompt, params)
            assert alone.outputs[0].token_ids == tokens, (self._seed, len(prompt), params)
        for llm in (self._prefill, self._decode):
            await _settle(llm)

    async def _request(self, dice: random.Random, number: int) -> None:
        stem = dice.choice(_STEMS)
        length = dice.choice((3, 40, 90, 150, LONGEST))
        prompt = [*stem[: dice.randint(1, length)], 5 + dice.randrange(200)]
        params = SamplingParams(
            max_tokens=dice.randint(1, 40), temperature=dice.choice((0.0, 1.0)), seed=number, ignore_eos=True
        )
        kind = dice.choice(("whole", "pull", "pull", "pull", "push", "push"))
        try:
            tokens = await getattr(self, f"_{kind}")(dice, prompt, params, number)
        except RequestError as error:
            self._count_late(kind, error)
            return
        self.seen[f"{kind} {'cancelled' if tokens is None else 'answered'}"] += 1
        if tokens is not None:
            assert len(tokens) == params.max_tokens
            self._wanted.append((prompt, params, tokens))

    async def _whole(
        self, dice: random.Random, prompt: list[int], params: SamplingParams, _: int
    ) -> list[int] | None:
        return await _read(dice.choice((self._prefill, self._decode)), dice, prompt, params, None)

    async def _pull(
        self, dice: random.Random, prompt: list[int], params: SamplingParams, _: int
    ) -> list[int] | None:
        fate = dice.random()
        begun = self._prefill.generate_async(
            prompt, params, disaggregated_params=DisaggregatedParams(request_type="context_only")
        )
        if fate < 0.1:
            await asyncio.sleep(0)
            begun.abort()
        result = await begun.aresult()
        if fate < 0.2 or result.outputs[0].finish_reason == "cancelled":
            if fate < 0.15:
                result.abort()
            return None  # else it is abandoned
        made = result.outputs[0].disaggregated_params
        assert made is not None
        handoff = replace(made, request_type="generation_only")
        return await _read(self._decode, dice, prompt, params, handoff)

    async def _push(
        self, dice: random.Random, prompt: list[int], params: SamplingParams, number: int
    ) -> list[int] | None:
        style, meeting = DisaggScheduleStyle.GENERATION_FIRST, _FIRST_ID + self._seed * 1000 + number
        context = DisaggregatedParams(
            request_type="context_only", disagg_request_id=meeting, schedule_style=style
        )
        generation = DisaggregatedParams(
            request_type="generation_only",
            ctx_request_id=meeting,
            disagg_request_id=meeting,
            ctx_info_endpoint=self._prefill.disaggregated_params["ctx_info_endpoint"],
            schedule_style=style,
        )
        prefilled = self._prefill.generate_async(prompt, params, disaggregated_params=context)
        if dice.random() < 0.1:
            prefilled.abort()
        try:
            return await _read(self._decode, dice, prompt, params, generation)
        finally:
            try:
                await prefilled.aresult()
            except RequestError as error:
                self._count_late("prefill", error)

    def _count_late(self, kind: str, error: RequestError) -> None:
        """Allow the only errors beyond the test: the peer left, or a lease ended while decode was full."""
        if error.category != "Unavailable":
            raise error
        self.seen[f"{kind} late"] += 1


async def _read(
    llm: LLM, dice: random.Random, prompt: list[int], params: SamplingParams, handoff: Any
) -> list[int] | None:
    """The answer; None if it was cancelled."""
    result = llm.generate_async(prompt, params, disaggregated_params=handoff, streaming=True)
    cut = dice.choice((None, None, None, 0, 1, dice.randint(1, 20)))
    if cut == 0:
        await asyncio.sleep(0)
        result.abort()
    async for update in result:
        if cut is not None and update.outputs[0].length >= cut and not update.finished:
            update.abort()
    output = result.outputs[0]
    return None if output.finish_reason == "cancelled" else list(output.token_ids)


async def _settle(llm: LLM) -> None:
    async with asyncio.timeout(_SETTLE_SECONDS):
        # The engine's own statistics come without an event.
        while llm.num_active_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        llm.get_stats()
        await llm.generate_async([3], SamplingParams(max_tokens=1))
        used: int | None = None
        while used is None:
            used = next((stat["kvCacheStats"]["usedNumBlocks"] for stat in reversed(llm.get_stats())), None)
            await asyncio.sleep(0.01)
    assert used is not None
    # The request for these statistics uses one block.
    assert used <= 1, f"{used} blocks are in use, and no request is left"


async def blow(model: Path, seeds: list[int], num_requests: int = 60, backend: str = "NIXL") -> Counter[str]:
    seen: Counter[str] = Counter()
    replays = Replay(), Replay()
    with start(model, backend) as prefill, start(model, backend) as decode:
        for seed in seeds:
            storm = Storm(prefill, decode, seed, replays)
            await storm.blow(num_requests)
            await storm.check()
            seen += storm.seen
            print(f"seed {seed}: {dict(storm.seen)}", file=sys.stderr, flush=True)
    return seen


if __name__ == "__main__":
    first, count = int(sys.argv[2]), int(sys.argv[3])
    asyncio.run(blow(Path(sys.argv[1]), list(range(first, first + count))))
