"""The engine on CUDA: the same scheduling, transformers' modules, torch's attention; tokens are transformers' own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import transfer
from tests.conftest import Checkpoints
from tests.gpu.conftest import MakeCore
from tests.support.models import greedy_answer
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.params.model_config import FAMILIES

NEW_TOKENS = 12
STEM = [2 + (i * 17 + i * i) % 250 for i in range(80)]
#: Two have a stem in common; one is over the window of 40 tokens that some families have.
PROMPTS = [[3], STEM + [9] * 53, [*STEM, 11, 12, 13], [200 - i for i in range(97)]]


def generated_by_transformers(directory: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to("cuda")
    return [greedy_answer(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def expected(family: str, checkpoints: Checkpoints) -> list[list[int]]:
    return generated_by_transformers(checkpoints(family))


def test_tokens_are_those_of_transformers_on_cuda(
    family: str, make_core: MakeCore, expected: list[list[int]]
) -> None:
    """Alone and in one piece; together and in chunks; and with the prompts in the prefix cache."""
    alone = make_core(family)
    assert [alone.generate(prompt, NEW_TOKENS) for prompt in PROMPTS] == expected
    together = make_core(family, max_num_tokens=32, enable_chunked_prefill=True)
    for _ in range(2):
        ids = [together.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
        last = together.run(*ids)
        assert [together.answers[i, 0].tokens for i in ids] == expected
    assert last.cached_tokens == 0
    assert together.answers[ids[1], 0].cached_tokens >= len(STEM) // 32 * 32


def test_a_pair_hands_kv_over_by_nixl(family: str, make_core: MakeCore, expected: list[list[int]]) -> None:
    """Out of one pool in device memory and into the other; the second time with both caches warm."""
    transfer = {"cache_transceiver_config": {"backend": "NIXL"}}
    prefill = make_core(family, max_num_tokens=64, enable_chunked_prefill=True, **transfer)
    decode = make_core(family, **transfer)
    for _ in range(2):
        handoffs = [prefill.prefill(prompt) for prompt in PROMPTS]
        ids = [decode.add_decode(p, h, NEW_TOKENS) for p, h in zip(PROMPTS, handoffs, strict=True)]
        decode.run(*ids)
        assert [decode.answers[i, 0].tokens for i in ids] == expected
        prefill.settle()


def test_a_draw_is_a_function_of_its_seed_on_cuda_too(make_core: MakeCore) -> None:
    core = make_core()
    spec = SamplingSpec(max_tokens=NEW_TOKENS, greedy=False, top_k=40, top_p=0.9, min_p=0.01, seed=5)
    alone = core.generate(PROMPTS[2], sampling=spec)
    ids = [core.add(prompt, sampling=spec) for prompt in PROMPTS]
    core.run(*ids)
    assert core.answers[ids[2], 0].tokens == alone


def test_bfloat16_serves_every_family(family: str, make_core: MakeCore) -> None:
    core = make_core(family, dtype="bfloat16")
    ids = [core.add(prompt, NEW_TOKENS) for prompt in PROMPTS]
    core.run(*ids)
    assert [len(core.answers[i, 0].tokens) for i in ids] == [NEW_TOKENS] * len(PROMPTS)


def test_an_unstated_pool_is_a_share_of_device_memory(make_core: MakeCore) -> None:
    core = make_core(kv_cache_config={"free_gpu_memory_fraction": 1e-5}, max_seq_len=2048)
    free, _ = torch.cuda.mem_get_info()
    model: Any = core.engine.model
    assert 0 < model.runner.pool.kv.nbytes < free * 1e-4


# -- workers are processes of their own: KV goes from one's device memory into the other's


SHAPE = transfer.KvShape("two-layers", layers=2, kv_heads=2, head_dim=64, dtype="float32", prompt_blocks=64)


def test_pulls_put_every_byte_in_its_place_on_the_gpu() -> None:
    with transfer.connected("NIXL", SHAPE, "cuda") as (_, _, receiver):
        assert receiver.pool.is_cuda
        for seed in range(3):
            remote, local = SHAPE.blocks("scattered", seed=seed), SHAPE.blocks("scattered", seed=seed + 7)
            receiver.pull(remote, local)
            receiver.require_arrived(remote, local)


def test_the_yardstick_copies_exactly_the_given_blocks() -> None:
    source, target = transfer.copy_pools(SHAPE, "cuda")
    source.random_()
    remote, local = SHAPE.blocks("scattered", seed=1), SHAPE.blocks("scattered", seed=2)
    transfer.copying((source, target), SHAPE.ranges(remote, local))()
    assert target[local].equal(source[remote])
    untouched = random.Random(0).sample(sorted(set(range(SHAPE.pool_blocks)) - set(local)), 8)
    assert not target[untouched].any()
