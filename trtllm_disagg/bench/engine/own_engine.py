"""The embedded engine's core in this process, stepped by hand: no API, no sockets, every step on the clock.

Every contestant has these methods, which `remote.py` calls:
prefill(prompt) -> seconds until the first token of a prompt that nobody has seen before;
decode(prompts, steps) -> seconds of each step in which every prompt gets one more token;
generate(prompts, tokens) -> greedy tokens, to see that all have the same weights;
close().
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trtllm_disagg.bench.engine.remote import Start
from trtllm_disagg.embedded.core.engine_core import EngineCore
from trtllm_disagg.embedded.ipc.messages import AddRequest, SamplingSpec, StepReport
from trtllm_disagg.embedded.params.llm_args import LlmArgs

TOKENS_PER_BLOCK = 32
#: Prompt tokens that pass through the cache without evicting a decode row's context.
_SPARE_TOKENS = 8192
_STEP_TOKENS = 4096
#: After so many steps every row must decode; the first ones have got as many tokens more by then.
_MOST_PREFILL_STEPS = 40


class OwnEngine:
    def __init__(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        self._start = start
        self._ids = itertools.count(1)
        rows = start.max_batch * -(-start.max_tokens // TOKENS_PER_BLOCK)
        self.core = self._build(rows + _SPARE_TOKENS // TOKENS_PER_BLOCK)

    def _build(self, blocks: int) -> EngineCore:
        start = self._start
        args = LlmArgs(
            model=start.model,
            skip_tokenizer_init=True,
            dtype=start.dtype,
            max_seq_len=start.max_tokens,
            max_batch_size=start.max_batch,
            max_num_tokens=_STEP_TOKENS,
            enable_chunked_prefill=True,
            kv_cache_config={"max_tokens": blocks * TOKENS_PER_BLOCK},  # type: ignore[arg-type]
            embedded={"device": "cpu", "num_threads": start.threads},  # type: ignore[arg-type]
        )
        return EngineCore(args, lambda: None)

    def rebuild(self, blocks: int) -> None:
        """The same engine with a pool of another size."""
        self.core.close()
        self.core = self._build(blocks)

    def prefill(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        return sum(seconds for seconds, _ in self._run())

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        with self._decoding(prompts, steps):
            return [self._step()[0] for _ in range(steps)]

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        answers: dict[int, list[int]] = {self._add(prompt, tokens): [] for prompt in prompts}
        for _, report in self._run():
            for output in report.outputs:
                answers[output.request_id] += output.token_ids
        return list(answers.values())

    def close(self) -> None:
        self.core.close()

    # -- internals

    @contextmanager
    def _decoding(self, prompts: list[list[int]], steps: int) -> Iterator[None]:
        """Every row decodes, and more than `steps` tokens are left to each.

        From the second time on a prompt's context is found in the prefix cache; every row has its own.
        """
        rows = [self._add(prompt, steps + _MOST_PREFILL_STEPS) for prompt in prompts]
        for _ in range(_MOST_PREFILL_STEPS - 1):
            self._step()
            running = self.core.scheduler.running
            if len(running) == len(rows) and not any(sequence.in_prefill for sequence in running):
                break
        else:
            raise RuntimeError(f"{len(running)} of {len(rows)} rows run")
        yield
        for row in rows:
            self.core.abort(row)
        for _ in self._run():
            pass

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

    def _run(self) -> Iterator[tuple[float, StepReport]]:
        while self.core.has_work:
            yield self._step()
