"""The embedded engine as its users have it: the LLM object here, the core in a process of its own."""

from __future__ import annotations

import asyncio
import time

import psutil
import uvloop

from trtllm_disagg.bench.engine.remote import Start
from trtllm_disagg.embedded import LLM, SamplingParams

_STEP_TOKENS = 4096

_SETTLE_SECONDS = 3.0


class LlmApi:
    """On the kind of event loop that a worker has: one, for all requests."""

    def __init__(self, start: Start) -> None:
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._llm = LLM(
            start.model,
            skip_tokenizer_init=True,
            dtype=start.dtype,
            max_seq_len=start.max_tokens,
            max_batch_size=start.max_batch,
            max_num_tokens=_STEP_TOKENS,
            enable_chunked_prefill=True,
            kv_cache_config={"max_tokens": start.max_batch * start.max_tokens, "enable_block_reuse": False},
            embedded={"num_threads": start.threads, "device": "cpu"},
        )

    def ttft(self, prompt: list[int]) -> float:
        """Seconds from generate_async to the first token."""
        return self._loop.run(self._ttft(prompt))

    def stream(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """All prompts at once, every token streamed: CPU seconds of this process for each."""
        self._loop.run(self._stream(prompts, 2))
        started, cpu = time.perf_counter(), time.process_time()
        count = self._loop.run(self._stream(prompts, tokens))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - started
        return {"cpu_per_token": cpu / count, "tokens_per_second": count / wall}

    def memory(self) -> dict[str, int]:
        """Bytes that the engine's idle process has in memory, and tokens that its pool has room for."""
        capacity = self._llm.get_kv_cache_capacity()
        return {
            "resident": self._settled(),
            "pool_tokens": capacity["maxNumBlocks"] * capacity["tokensPerBlock"],
        }

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.close()

    def _settled(self) -> int:
        """An idle engine gives back what a step took; it does not say when."""
        process = psutil.Process(self._llm.engine_pid)
        least = process.memory_info().rss
        end = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < end:
            time.sleep(0.1)
            least = min(least, process.memory_info().rss)
        return least

    async def _ttft(self, prompt: list[int]) -> float:
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        started = time.perf_counter()
        result = self._llm.generate_async(prompt, sampling, streaming=True)
        await anext(result)
        return time.perf_counter() - started

    async def _stream(self, prompts: list[list[int]], tokens: int) -> int:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

        async def one(prompt: list[int]) -> int:
            result = self._llm.generate_async(prompt, sampling, streaming=True)
            async for _ in result:
                pass
            return result.outputs[0].length

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))
