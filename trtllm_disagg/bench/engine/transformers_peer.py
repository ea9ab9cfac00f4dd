"""transformers' continuous batching (what `generate_batch` runs), kept running, tokens timed as they stream out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from trtllm_disagg.bench.engine.remote import Start

_PAGE_TOKENS = 32
_STEP_TOKENS = 4096
_SPARE_PAGES = 256
_PATIENCE_SECONDS = 300.0


class GenerateBatch:
    def __init__(self, start: Start) -> None:
        torch.set_num_threads(start.threads)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            start.model, dtype=getattr(torch, start.dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._manager = model.eval().init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=start.max_batch * (-(-start.max_tokens // _PAGE_TOKENS) + 1) + _SPARE_PAGES,
                max_batch_tokens=_STEP_TOKENS,
                max_requests_per_batch=max(start.max_batch, 8),
                use_cuda_graph=False,
            ),
        )
        self._manager.start()

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        self._run([prompt], 1)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        """A step ends when the last row's token is out."""
        self._run(prompts, 1)
        ends: list[float] = [0.0] * (steps + 2)
        for arrived, _, count in self._stream(prompts, steps + 2):
            ends[count - 1] = max(ends[count - 1], arrived)
        return [later - earlier for earlier, later in itertools.pairwise(ends[1:])]

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return self._run(prompts, tokens)

    def close(self) -> None:
        self._manager.stop(block=True)

    def _run(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        for _, output, _ in self._stream(prompts, tokens):
            answers[output.request_id] = list(output.generated_tokens)
        return [answers[name] for name in sorted(answers, key=lambda name: int(name.rpartition("_")[2]))]

    def _stream(self, prompts: list[list[int]], tokens: int) -> Iterator[tuple[float, Any, int]]:
        """When, what, and how many tokens the row has by then."""
        unfinished = set(self._manager.add_requests(prompts, max_new_tokens=tokens, streaming=True))
        while unfinished:
            output = self._manager.get_result(timeout=_PATIENCE_SECONDS)
            if output is None or output.error is not None:
                raise RuntimeError(f"generate_batch: {output.error if output else 'no answer'}")
            yield time.perf_counter(), output, len(output.generated_tokens)
            if output.is_finished():
                unfinished.discard(output.request_id)
