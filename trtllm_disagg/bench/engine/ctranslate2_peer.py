"""CTranslate2's Generator, timed by its callback: it reports every token of every row.

It cannot go back to the end of a prompt, but it keeps the state of one static prompt. A decode row is that state,
copied for it, and a last token of its own: as long as everybody else's rows, with other words in them.
"""

from __future__ import annotations

import itertools
import time

import ctranslate2

from trtllm_disagg.bench.engine.remote import Start


class CTranslate2:
    def __init__(self, start: Start) -> None:
        self._generator = ctranslate2.Generator(
            start.model, device="cpu", compute_type=start.dtype, inter_threads=1, intra_threads=start.threads
        )

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        self._generate([prompt], 1)
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        arrived: dict[int, float] = {}

        def note(result: ctranslate2.GenerationStepResult) -> bool:
            arrived.setdefault(result.step, time.perf_counter())
            return False

        lasts = [prompt[-1:] for prompt in prompts]
        self._generate(lasts, steps + 2, static_prompt=_words(prompts[0][:-1]), callback=note)
        times = [arrived[step] for step in sorted(arrived)][1:]
        return [later - earlier for earlier, later in itertools.pairwise(times)][-steps:]

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return self._generate(prompts, tokens)

    def close(self) -> None:
        self._generator.unload_model()

    def _generate(self, prompts: list[list[int]], tokens: int, **more: object) -> list[list[int]]:
        results = self._generator.generate_batch(
            [_words(prompt) for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            include_prompt_in_result=False,
            sampling_topk=1,
            beam_size=1,
            end_token=[],
            **more,
        )
        return [list(result.sequences_ids[0]) for result in results]


def _words(tokens: list[int]) -> list[str]:
    return [f"t{token}" for token in tokens]
