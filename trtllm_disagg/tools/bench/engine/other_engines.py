"""Adapters for the other engines, each with the methods that own_engine.py lists.

Each runs in its own process, some with another interpreter. So each class imports the library that it needs, and this
file imports nothing of this package.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PAGE_TOKENS = 32
_STEP_TOKENS = 4096
_SPARE_PAGES = 256
_UBATCH_TOKENS = 512
_PATIENCE_SECONDS = 300.0


class Arrivals:
    """Records when the last row got its n-th token. Time 0 is the creation."""

    def __init__(self) -> None:
        self._times = {0: time.perf_counter()}

    def note(self, count: int) -> None:
        """A row has `count` tokens now."""
        self._times[count] = time.perf_counter()

    def steps(self, steps: int) -> list[float]:
        """Seconds of the last `steps` steps. A step ends when the last row has its token. Steps with tokens that
        arrived together count as equally long.
        """
        seconds: list[float] = []
        for before, count in itertools.pairwise(sorted(self._times)):
            together = count - before
            seconds += [(self._times[count] - self._times[before]) / together] * together
        return seconds[-steps:]


class Peer:
    """Base of the adapters. `decode` generates two tokens more than steps, since the first steps lack some rows."""

    def prefill(self, prompt: list[int]) -> float:
        started = time.perf_counter()
        self.answer([prompt], 1, Arrivals())
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        self.answer(prompts, 1, Arrivals())  # fills the prefix cache with the contexts
        arrivals = Arrivals()
        self.answer(prompts, steps + 2, arrivals)
        return arrivals.steps(steps)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return self.answer(prompts, tokens, Arrivals())

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        """Greedy tokens of each prompt, all prompts at once."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class LlamaCpp(Peer):
    """llama.cpp's server loop in this process (xllamacpp): a slot a row, which keeps its context.

    KV is float32 beside float32 weights, else llama.cpp's default.
    """

    def __init__(self, start: Any) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = start.model
        parameters.n_parallel = start.max_batch
        parameters.n_ctx = start.max_batch * -(-start.max_tokens // 256) * 256
        parameters.n_batch, parameters.n_ubatch = max(_UBATCH_TOKENS, start.max_tokens), _UBATCH_TOKENS
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = start.threads
        parameters.kv_unified = False
        parameters.cache_ram_mib = 0
        parameters.verbosity = -1
        if start.dtype == "float32":
            parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self._server = xllamacpp.Server(parameters)

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]

        def ask(slot: int) -> None:
            def take(chunk: dict[str, Any]) -> None:
                if text := chunk["choices"][0]["text"]:
                    answers[slot].append(int(text[1:]))
                    arrivals.note(len(answers[slot]))

            asked = {"prompt": prompts[slot], "n_predict": tokens, "id_slot": slot, "cache_prompt": True}
            self._server.handle_completions(
                asked | {"samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "stream": True}, take
            )

        threads = [threading.Thread(target=ask, args=(slot,)) for slot in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


class VllmCpu(Peer):
    """vLLM's engine, core and all in this process, stepped as its `LLM.generate` steps it."""

    def __init__(self, start: Any) -> None:
        level = os.environ.get("ATEN_CPU_CAPABILITY", "native")
        os.environ |= {
            # Compiled code is kept separately for each CPU level.
            "VLLM_CACHE_ROOT": str(Path(start.model).parent / f"vllm-{level}"),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(start)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch

        if level == "avx2":
            # vLLM chooses its compiled kernels by this function.
            torch.cpu._is_avx512_supported = lambda: False
        import vllm

        self._vllm, self._ids = vllm, itertools.count()
        self._engine = vllm.LLM(
            start.model,
            dtype=start.dtype,
            skip_tokenizer_init=True,
            max_model_len=start.max_tokens,
            max_num_seqs=max(start.max_batch, 8),
            max_num_batched_tokens=_STEP_TOKENS,
            block_size=_PAGE_TOKENS,
            enable_prefix_caching=True,
        ).llm_engine

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        sampling = self._vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        answers: dict[str, list[int]] = {str(next(self._ids)): [] for _ in prompts}
        for name, prompt in zip(answers, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                answers[output.request_id] = list(output.outputs[0].token_ids)
                arrivals.note(len(output.outputs[0].token_ids))
        return list(answers.values())


def _kv_gib(start: Any) -> int:
    """GiB for every row twice, so that contexts stay cached beside new prompts."""
    config = json.loads((Path(start.model) / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    token: int = 8 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return int(-(-2 * start.max_batch * start.max_tokens * token // (1 << 30)))


class CTranslate2(Peer):
    """CTranslate2's Generator, timed by its callback: it reports every token of every row.

    It cannot go back to the end of a prompt, but it keeps the state of one static prompt. A decode row is that state,
    copied for it, and a last token of its own: as long as the other engines' rows, with other words in them.
    """

    def __init__(self, start: Any) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            start.model, device="cpu", compute_type=start.dtype, inter_threads=1, intra_threads=start.threads
        )

    def decode(self, prompts: list[list[int]], steps: int) -> list[float]:
        arrivals = Arrivals()
        lasts = [prompt[-1:] for prompt in prompts]
        self.answer(lasts, steps + 2, arrivals, static_prompt=_words(prompts[0][:-1]))
        return arrivals.steps(steps)

    def answer(
        self, prompts: list[list[int]], tokens: int, arrivals: Arrivals, **more: object
    ) -> list[list[int]]:
        results = self._generator.generate_batch(
            [_words(prompt) for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            include_prompt_in_result=False,
            sampling_topk=1,
            beam_size=1,
            end_token=[],
            callback=lambda result: arrivals.note(result.step),
            **more,
        )
        return [list(result.sequences_ids[0]) for result in results]

    def close(self) -> None:
        self._generator.unload_model()


def _words(tokens: list[int]) -> list[str]:
    return [f"t{token}" for token in tokens]


class GenerateBatch(Peer):
    """transformers' continuous batching (what `generate_batch` runs), kept running, tokens as they stream out."""

    def __init__(self, start: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
        from transformers.utils import logging

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

    def answer(self, prompts: list[list[int]], tokens: int, arrivals: Arrivals) -> list[list[int]]:
        names = self._manager.add_requests(prompts, max_new_tokens=tokens, streaming=True)
        answers: dict[str, list[int]] = {}
        for output in self._outputs(set(names)):
            answers[output.request_id] = list(output.generated_tokens)
            arrivals.note(len(output.generated_tokens))
        return [answers[name] for name in sorted(answers, key=lambda name: int(name.rpartition("_")[2]))]

    def close(self) -> None:
        self._manager.stop(block=True)

    def _outputs(self, unfinished: set[str]) -> Iterator[Any]:
        while unfinished:
            output = self._manager.get_result(timeout=_PATIENCE_SECONDS)
            if output is None or output.error is not None:
                raise RuntimeError(f"generate_batch: {output.error if output else 'no answer'}")
            yield output
            if output.is_finished():
                unfinished.discard(output.request_id)
