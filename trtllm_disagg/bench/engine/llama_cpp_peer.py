"""llama.cpp through the C functions of llama-cpp-python: its fastest way, a batch of rows a call and greedy sampling.

KV is float32 beside float32 weights, else llama.cpp's default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as c
import numpy as np

from trtllm_disagg.bench.engine.remote import Start

_UBATCH = 512
_FLOAT32 = 0


@c.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


class LlamaCpp:
    def __init__(self, start: Start) -> None:
        c.llama_log_set(_silent, None)
        c.llama_backend_init()
        self._start = start
        self._model = c.llama_model_load_from_file(start.model.encode(), c.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"cannot load {start.model}")
        self._rows = self._context(start.max_batch)
        self._single = self._context(1)
        #: Prompt of each row of `_rows`, whose KV is there.
        self._known: list[list[int]] = []
        self._firsts: list[int] = []
        self._batch = c.llama_batch_init(max(start.max_tokens, start.max_batch), 0, 1)

    def prefill(self, prompt: list[int]) -> float:
        c.llama_memory_clear(c.llama_get_memory(self._single), False)
        started = time.perf_counter()
        self._prompt(self._single, 0, prompt)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        tokens = self._rewound(prompts)
        position = len(prompts[0])
        tokens = self._step(tokens, position)
        seconds = []
        for step in range(1, steps + 1):
            started = time.perf_counter()
            tokens = self._step(tokens, position + step)
            seconds.append(time.perf_counter() - started)
        return seconds

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        answers = [self._rewound(prompts)]
        for i in range(tokens - 1):
            answers.append(self._step(answers[-1], len(prompts[0]) + i))
        return [list(row) for row in zip(*answers, strict=True)]

    def close(self) -> None:
        c.llama_batch_free(self._batch)
        for context in (self._rows, self._single):
            c.llama_free(context)
        c.llama_model_free(self._model)

    # -- internals

    def _context(self, rows: int) -> Any:
        parameters = c.llama_context_default_params()
        parameters.n_ctx = rows * -(-self._start.max_tokens // 256) * 256
        parameters.n_batch, parameters.n_ubatch = max(_UBATCH, self._start.max_tokens), _UBATCH
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = self._start.threads
        parameters.kv_unified = False
        if self._start.dtype == "float32":
            parameters.type_k = parameters.type_v = _FLOAT32
        context = c.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError("llama_init_from_model failed")
        return context

    def _rewound(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each prompt, which stands at the end of its prompt again."""
        if self._known[: len(prompts)] != prompts[: len(self._known)]:
            c.llama_memory_clear(c.llama_get_memory(self._rows), False)
            self._known, self._firsts = [], []
        for row, prompt in enumerate(prompts):
            if row == len(self._known):
                self._firsts.append(self._prompt(self._rows, row, prompt))
                self._known.append(prompt)
            c.llama_memory_seq_rm(c.llama_get_memory(self._rows), row, len(prompt), -1)
        return self._firsts[: len(prompts)]

    def _prompt(self, context: Any, row: int, prompt: Sequence[int]) -> int:
        last = len(prompt) - 1
        return self._decode(context, [(token, i, row, i == last) for i, token in enumerate(prompt)])[0]

    def _step(self, tokens: Sequence[int], position: int) -> list[int]:
        return self._decode(self._rows, [(token, position, row, True) for row, token in enumerate(tokens)])

    def _decode(self, context: Any, entries: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Entries are (token, position, row, wanted); the greedy token of each wanted one."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = wanted
        if status := c.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        wanted_rows = sum(entry[3] for entry in entries)
        shape = (wanted_rows, self._start.vocab_size)
        logits = np.ctypeslib.as_array(c.llama_get_logits(context), shape=shape)
        return [int(token) for token in logits.argmax(axis=1)]
