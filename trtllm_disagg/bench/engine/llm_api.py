"""The embedded engine as its users have it: the LLM object here, the core in a process of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil

from trtllm_disagg.bench.engine.remote import Start
from trtllm_disagg.embedded import LLM, SamplingParams


class LlmApi:
    def __init__(self, start: Start) -> None:
        self._start = start

    def added_ttft(self, prompts: list[list[int]]) -> list[float]:
        """Seconds from generate_async to the first token that are not the engine's step, one prompt at a time."""
        with self._llm(enable_iter_perf_stats=True) as llm:
            return asyncio.run(_added_ttft(llm, prompts))

    def stream(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """All prompts at once, every token streamed: CPU seconds of this process a token, and the core's memory."""
        with self._llm() as llm:
            asyncio.run(_stream(llm, prompts, 2))
            started, cpu = time.perf_counter(), time.process_time()
            count = asyncio.run(_stream(llm, prompts, tokens))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - started
            capacity = llm.get_kv_cache_capacity()
            return {
                "cpu_per_token": cpu / count,
                "tokens_per_second": count / wall,
                "resident": psutil.Process(llm.engine_pid).memory_info().rss,
                "pool_tokens": capacity["maxNumBlocks"] * capacity["tokensPerBlock"],
            }

    def close(self) -> None:
        pass

    def _llm(self, **more: Any) -> LLM:
        start = self._start
        return LLM(
            start.model,
            skip_tokenizer_init=True,
            dtype=start.dtype,
            max_seq_len=start.max_tokens,
            max_batch_size=start.max_batch,
            max_num_tokens=4096,
            enable_chunked_prefill=True,
            kv_cache_config={"max_tokens": start.max_batch * start.max_tokens, "enable_block_reuse": False},
            embedded={"num_threads": start.threads, "device": "cpu"},
            **more,
        )


async def _added_ttft(llm: LLM, prompts: list[list[int]]) -> list[float]:
    seconds = []
    for prompt in prompts:
        started = time.perf_counter()
        async for _ in llm.generate_async(prompt, SamplingParams(max_tokens=1), streaming=True):
            seconds.append(time.perf_counter() - started)
            (step,) = [
                step for step in llm.get_stats() if step["inflightBatchingStats"]["numScheduledRequests"]
            ]
            seconds[-1] -= step["iterLatencyMS"] / 1000
    return seconds


async def _stream(llm: LLM, prompts: list[list[int]], tokens: int) -> int:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> int:
        result = llm.generate_async(prompt, sampling, streaming=True)
        async for _ in result:
            pass
        return result.outputs[0].length

    return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))
