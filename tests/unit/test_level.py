"""An engine at a lower CPU level: what it is told, what it does without, and what it answers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded import LLM, DisaggregatedParams, SamplingParams
from trtllm_disagg.engines.embedded.cpu_kernels.cpu import SETTING, this_cpu

PROMPT = [5 + i % 11 for i in range(70)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False)
#: Below this machine's own.
LEVELS = [*(["torch"] if this_cpu().compiles else []), *(["avx2"] if this_cpu().level == "avx512" else [])]


def start(model: Path, dtype: str = "float32") -> LLM:
    return LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        kv_cache_config={"max_tokens": 1024},
        cache_transceiver_config={"backend": "SHARED_MEMORY"},
        max_seq_len=256,
    )


def answer(llm: LLM) -> list[int]:
    result: Any = llm.generate(PROMPT, PARAMS)
    return list(result.outputs[0].token_ids)


@pytest.fixture(scope="module")
def native(checkpoints: Checkpoints) -> Iterator[LLM]:
    with start(checkpoints()) as llm:
        yield llm


@pytest.mark.parametrize("level", LEVELS)
def test_engines_at_two_levels_answer_alike_and_hand_over_to_each_other(
    native: LLM, checkpoints: Checkpoints, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handed_over(prefill: LLM, decode: LLM) -> list[int]:
        asked = DisaggregatedParams(request_type="context_only", disagg_request_id=1 << 41)
        made = await prefill.generate_async(PROMPT, PARAMS, disaggregated_params=asked)
        given = made.outputs[0].disaggregated_params
        assert given is not None
        told = dataclasses.replace(given, request_type="generation_only")
        result = await decode.generate_async(PROMPT, PARAMS, disaggregated_params=told)
        return list(result.outputs[0].token_ids)

    expected = answer(native)
    monkeypatch.setenv(SETTING, level)
    with start(checkpoints()) as lowered:
        assert answer(lowered) == expected
        assert asyncio.run(handed_over(native, lowered)) == expected
        assert asyncio.run(handed_over(lowered, native)) == expected


@pytest.mark.parametrize("level", LEVELS[:1])
def test_bfloat16_model_computed_in_float32_is_logged_once(
    checkpoints: Checkpoints, level: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SETTING, level)
    with start(checkpoints(), "bfloat16") as llm:
        assert llm.is_exact
        assert len(answer(llm)) == 12
    told = capfd.readouterr().err
    assert told.count(f"CPU level {level}") == 1
    assert told.count("bfloat16 model, computed in float32") == 1


def test_level_torch_needs_no_kernel_and_no_compiler(checkpoints: Checkpoints) -> None:
    program = """
import sys
from pathlib import Path
sys.modules["numba"] = sys.modules["llvmlite"] = None  # not installed
from tests.support.cores import Core
for model in sys.argv[1:]:
    for dtype in ("float32", "bfloat16"):
        core = Core(Path(model), dtype=dtype)
        core.run(*(core.add(range(2, 2 + length), 8) for length in (1, 33, 70)))
        core.close()
"""
    environment = dict(os.environ) | {SETTING: "torch"}
    models = [str(checkpoints(family)) for family in ("llama", "gemma2", "qwen3_moe")]
    subprocess.run([sys.executable, "-c", program, *models], env=environment, check=True)
