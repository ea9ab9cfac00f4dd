"""An engine holds its weights once: resident memory of the engine's own process, measured from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.support.models import write_checkpoint
from trtllm_disagg.engines.embedded import LLM, SamplingParams

MIB = 2**20
#: What each way of computing loads. How much that takes depends on what else is installed: CUDA, pandas, ...
LIBRARIES = {"auto": "torch, numba", "transformers": "torch, numba, transformers.models.llama.modeling_llama"}
#: Without libraries: our own code, compiled kernels, and the activations of a step of 512 tokens.
PROGRAM = 120 * MIB
MAX_TOKENS = 4096
GROWTH = 40 * MIB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 100 million parameters."""
    return write_checkpoint(
        tmp_path_factory.mktemp("large"),
        vocab_size=8192,
        hidden_size=768,
        intermediate_size=2560,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )


def resident(pid: int) -> dict[str, int]:
    """VmRSS and VmHWM (the most there ever was), bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}


def resident_with(libraries: str) -> int:
    """Bytes of a process that has only loaded them."""
    code = f"import {libraries}; print(open('/proc/self/statm').read())"
    told = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(told.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(pid: int, limit: float) -> dict[str, int]:
    """An idle engine gives back what a step took; it does not say when."""
    end = time.monotonic() + 5
    while resident(pid)["VmRSS"] > limit and time.monotonic() < end:
        time.sleep(0.1)
    return resident(pid)


def test_memory_does_not_grow_with_the_lengths_of_prompts(checkpoints: Checkpoints) -> None:
    """Without a bound, what is kept for each number of rows takes 0.2 MB a product."""
    with LLM(
        checkpoints(),
        kv_cache_config={"max_tokens": MAX_TOKENS, "enable_block_reuse": False},
        skip_tokenizer_init=True,
    ) as llm:
        params = SamplingParams(max_tokens=1, detokenize=False)

        def compute(lengths: range) -> None:
            for length in lengths:
                llm.generate([2 + i * 7 % 250 for i in range(length)], params)

        compute(range(60, 100, 4))
        started = settled(llm.engine_pid, 0)["VmRSS"]
        compute(range(100, 500, 4))
        worked = settled(llm.engine_pid, started + GROWTH)["VmRSS"]
    assert worked <= started + GROWTH, f"{started >> 20} MiB, then {worked >> 20}"


@pytest.mark.parametrize("forward", ["auto", "transformers"])
def test_resident_memory_is_the_weights_once_and_the_pool(checkpoint: Path, forward: str) -> None:
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert weights > 350 * MIB
    with LLM(
        checkpoint,
        kv_cache_config={"max_tokens": MAX_TOKENS},
        max_num_tokens=512,
        enable_chunked_prefill=True,
        embedded={"forward": forward},
        skip_tokenizer_init=True,
    ) as llm:
        pool = MAX_TOKENS * 2 * 12 * 4 * 64 * 4
        limit = 1.25 * weights + pool + resident_with(LIBRARIES[forward]) + PROGRAM
        started = settled(llm.engine_pid, limit)
        prompt = [2 + i * 7 % 8000 for i in range(1500)]
        llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False))
        worked = settled(llm.engine_pid, limit)
    report = f"{forward}: weights {weights >> 20}, pool {pool >> 20} MiB; started {started}, worked {worked}"
    print(report)
    assert started["VmRSS"] <= limit, report
    assert worked["VmRSS"] <= limit, report
