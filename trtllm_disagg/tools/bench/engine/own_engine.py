"""Contestants made of the embedded engine: its core in this process, with each step timed, and its LLM API.

Every contestant has these methods:
prefill(prompt) -> seconds to the first token of a prompt that the engine has not seen before;
decode(prompts, steps) -> seconds of each step in which every prompt gets one more token;
generate(prompts, tokens) -> greedy tokens, to see that all have the same weights;
close().
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch
import uvloop

from trtllm_disagg.engines.embedded import LLM, SamplingParams
from trtllm_disagg.engines.embedded.core import core_process
from trtllm_disagg.engines.embedded.core.build import build_core
from trtllm_disagg.engines.embedded.core.core_client import REPORTS
from trtllm_disagg.engines.embedded.core.engine_core import EngineCore
from trtllm_disagg.engines.embedded.ipc.messages import AddRequest, Report, SamplingSpec, StepReport
from trtllm_disagg.engines.embedded.ipc.messages import Start as ProcessStart
from trtllm_disagg.engines.embedded.ipc.sockets import Link, accept, listen
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.scheduler.scheduler import Row
from trtllm_disagg.tools.bench.engine.other_engines import Arrivals, Peer

if TYPE_CHECKING:
    from trtllm_disagg.tools.bench.engine.contestants import Start

TOKENS_PER_BLOCK = 32
#: Prompt tokens that pass through the cache without evicting a decode row's context.
_SPARE_TOKENS = 8192
_STEP_TOKENS = 4096
_SETTLE_SECONDS = 3.0


class OwnEngine(Peer):
    def __init__(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        self._start = start
        self._ids = itertools.count(1)
        rows = start.max_batch * -(-start.max_tokens // TOKENS_PER_BLOCK)
        self.core = self._build(rows + _SPARE_TOKENS // TOKENS_PER_BLOCK)

    def _build(self, blocks: int) -> EngineCore:
        return build_core(LlmArgs(**_arguments(self._start, blocks * TOKENS_PER_BLOCK)), lambda: None)

    def rebuild(self, blocks: int) -> None:
        """The same engine with a pool of another size."""
        self.core.close()
        self.core = self._build(blocks)

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        answers: dict[int, list[int]] = {self._add(prompt, tokens): [] for prompt in prompts}
        while self.core.has_work:
            for output in self._step()[1].outputs:
                answers[output.request_id] += output.token_ids
                arrivals.note(len(answers[output.request_id]))
        return list(answers.values())

    def split(self, prompts: list[list[int]], steps: int) -> dict[str, list[float]]:
        """Seconds of the last `steps` decode steps: the whole step, its forward, and the IPC of its report."""
        self.answer(prompts, 1, Arrivals())  # fills the prefix cache with the contexts
        core: Any = self.core
        runner = core.model.runner = _TimedRunner(core.model.runner)
        for prompt in prompts:
            self._add(prompt, steps + 2)
        timed = []
        try:
            while core.has_work:
                seconds, report = self._step()
                timed.append((seconds, runner.seconds, report))
        finally:
            core.model.runner = runner._runner
        whole, forward, reports = zip(*timed[-steps:], strict=True)
        return {"step": list(whole), "forward": list(forward), "ipc": _ipc_seconds(reports)}

    def close(self) -> None:
        self.core.close()

    def _add(self, prompt: list[int], tokens: int) -> int:
        request_id = next(self._ids)
        self.core.add(
            AddRequest(request_id, prompt, SamplingSpec(max_tokens=tokens), "context_and_generation")
        )
        return request_id

    def _step(self) -> tuple[float, StepReport]:
        started = time.perf_counter()
        report = self.core.step()
        seconds = time.perf_counter() - started
        for output in report.outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return seconds, report


def _arguments(start: Start, pool_tokens: int) -> dict[str, Any]:
    return {
        "model": start.model,
        "skip_tokenizer_init": True,
        "dtype": start.dtype,
        "max_seq_len": start.max_tokens,
        "max_batch_size": start.max_batch,
        "max_num_tokens": _STEP_TOKENS,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"max_tokens": pool_tokens},
        "embedded": {"device": "cpu", "num_threads": start.threads},
    }


class _TimedRunner:
    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.seconds = 0.0

    def run(self, rows: Sequence[Row]) -> torch.Tensor:
        started = time.perf_counter()
        logits: torch.Tensor = self._runner.run(rows)
        self.seconds = time.perf_counter() - started
        return logits


def _ipc_seconds(reports: Sequence[StepReport]) -> list[float]:
    """Seconds to encode and send each report and to receive commands, as core_process.py does between two steps."""
    listener, address = listen()
    with listener:
        process = core_process.CoreProcess(ProcessStart({}, address))
        incoming = Link(accept(listener), REPORTS)
    reader = threading.Thread(target=lambda: _read_all(incoming))
    reader.start()
    seconds = []
    for report in reports:
        started = time.perf_counter()
        process.report(report)
        process._take(process._wait(0.0))
        seconds.append(time.perf_counter() - started)
    process.close()
    reader.join()
    incoming.close()
    return seconds


def _read_all(incoming: Link[Report]) -> None:
    with contextlib.suppress(EOFError):
        while True:
            incoming.receive(wait=True)


class LlmApi(Peer):
    """The engine as its users run it: the LLM object on an event loop, and the core in its own process."""

    def __init__(self, start: Start) -> None:
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._llm = LLM(**_arguments(start, start.max_batch * start.max_tokens + _SPARE_TOKENS))

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        return self._loop.run(self._answer(prompts, tokens, arrivals))

    def stream(self, prompts: list[list[int]], tokens: int) -> float:
        """Streams all prompts at once. Returns this process's CPU seconds for each token."""
        self.generate(prompts, 2)
        before = time.process_time()
        count = sum(map(len, self.generate(prompts, tokens)))
        return (time.process_time() - before) / count

    def memory(self) -> dict[str, int]:
        """The resident bytes of the idle engine process, and the tokens that its pool holds."""
        capacity = self._llm.get_kv_cache_capacity()
        pool_tokens = capacity["maxNumBlocks"] * capacity["tokensPerBlock"]
        return {"resident": self._settled(), "pool_tokens": pool_tokens}

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.close()

    async def _answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

        async def one(prompt: list[int]) -> list[int]:
            result = self._llm.generate_async(prompt, sampling, streaming=True)
            async for _ in result:
                arrivals.note(result.outputs[0].length)
            return list(result.outputs[0].token_ids)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    def _settled(self) -> int:
        """The least resident bytes within some seconds: an idle engine returns a step's memory at some time."""
        process = psutil.Process(self._llm.engine_pid)
        least = process.memory_info().rss
        end = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < end:
            time.sleep(0.1)
            least = min(least, process.memory_info().rss)
        return least
