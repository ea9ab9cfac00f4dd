"""Cores with guided decoding, and grammars in the tests' tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.support.cores import Answer, Core
from tests.support.models import EOS
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.model.guided_decoding import Guide, grammar_of
from trtllm_disagg.engines.embedded.params.request_params import GuidedDecodingParams

PROMPT = [5 + i % 11 for i in range(40)]

#: Bytes in the order of the tests' tokenizer, after its two special tokens.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173]


def text_of(tokens: list[int]) -> str:
    return bytes(BYTES[token - 2] for token in tokens).decode()


def tokens_of(text: str) -> list[int]:
    return [BYTES.index(byte) + 2 for byte in text.encode()]


def guided(params: GuidedDecodingParams, max_tokens: int = 150, **more: Any) -> SamplingSpec:
    fields: dict[str, Any] = {"greedy": False, "end_ids": (EOS,)} | more
    return SamplingSpec(max_tokens=max_tokens, grammar=grammar_of(params), **fields)


def regex(pattern: str, **more: Any) -> SamplingSpec:
    return guided(GuidedDecodingParams(regex=pattern), **more)


@contextmanager
def guiding_cores(model: Path) -> Iterator[tuple[Core, Core]]:
    settings = {
        "guided_decoding_backend": "llguidance",
        "cache_transceiver_config": {"backend": "SHARED_MEMORY"},
        "max_batch_size": 32,
        "kv_cache_config": {"max_tokens": 4096},
    }
    pair = Core(model, **settings), Core(model, **settings)
    yield pair
    for core in pair:
        core.close()


def guide_of(core: Core, sampling: SamplingSpec) -> Guide:
    guides = core.engine.guides
    assert guides is not None
    guide = guides.start(sampling)
    assert guide is not None
    return guide


def run(core: Core, sampling: SamplingSpec, prompt: list[int] = PROMPT) -> Answer:
    return core.run(core.add(prompt, sampling=sampling))


def run_split(cores: tuple[Core, Core], sampling: SamplingSpec, prompt: list[int] = PROMPT) -> Answer:
    """Prefill on the first core, decode on the second."""
    first, second = cores
    one = msgspec.structs.replace(sampling, max_tokens=1)
    answer = first.run(first.add(prompt, sampling=one, request_type="context_only"))
    if answer.handoff is None:
        return answer
    return second.run(second.add_decode(prompt, answer.handoff, sampling=sampling, logprobs=answer.logprobs))
