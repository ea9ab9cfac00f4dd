"""Float32 is exact: a position's logits are the same bits however its request was scheduled, cached or split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.models import write_checkpoint
from tests.support.ranks import PROMPTS as SOME
from tests.support.ranks import STEM, Logits, MakeCore, Recorder
from trtllm_disagg.engines.embedded.core import build as core_module
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.engines.embedded.params.model_config import FAMILIES

#: With ten no prompt would reach a block of 16, 32 or 64 tokens that it does not reach with six.
NEW_TOKENS = 6
_ARRIVAL_SECONDS = 1.0
#: The last one is the start of two others, and ends nowhere in particular.
PROMPTS = [*SOME, [2 + (i * 29) % 251 for i in range(65)], STEM[:77]]
#: Mixtral is Mistral's attention and Qwen3's experts.
EXACT_FAMILIES = [family for family in FAMILIES if family != "mixtral"]
#: One of each kind: the plain forward, with a window, transformers' modules. The others share these; their chunks and
#: their reuse are in test_logits_after_a_handoff_have_the_bits_of_solo_requests.
thorough = pytest.mark.parametrize(
    "way", [("llama", "auto"), ("mistral", "auto"), ("gemma2", "auto")], indirect=True, ids="-".join
)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(PROMPTS)
    monkeypatch.setattr(core_module, "sample", made.sample)
    return made


@pytest.fixture(
    params=[*((family, "auto") for family in EXACT_FAMILIES), ("mistral", "transformers")], ids="-".join
)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, forward = request.param
    return family, forward


@pytest.fixture
def make_core(way: tuple[str, str], checkpoints: Checkpoints) -> Iterator[MakeCore]:
    family, forward = way
    made: list[Core] = []

    def make(**args: Any) -> Core:
        embedded = {"forward": forward, **args.pop("embedded", {})}
        made.append(Core(checkpoints(family), embedded=embedded, **args))
        return made[-1]

    yield make
    for core in made:
        core.assert_idle()
        core.close()


@pytest.fixture(scope="module")
def solos() -> dict[tuple[str, str], Logits]:
    """Of each way, computed once."""
    return {}


@pytest.fixture
def solo(
    way: tuple[str, str], make_core: MakeCore, recorder: Recorder, solos: dict[tuple[str, str], Logits]
) -> Logits:
    """Each prompt alone, in one piece, with nothing in the cache."""
    if way not in solos:
        core = make_core(kv_cache_config={"max_tokens": 256, "enable_block_reuse": False})
        for prompt in PROMPTS:
            core.generate(prompt, NEW_TOKENS)
        solos[way] = recorder.take()
        assert len(solos[way]) == len(PROMPTS) * NEW_TOKENS
    return solos[way]


def assert_same_bits(rows: Logits, expected: Logits) -> None:
    assert rows.keys() == expected.keys()
    different = [key for key in rows if not torch.equal(rows[key], expected[key])]
    assert not different, f"(prompt, position) with other bits: {different}"


def test_logits_in_a_batch_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits
) -> None:
    core = make_core()
    core.run(*(core.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
    assert_same_bits(recorder.take(), solo)


def test_logits_in_a_batch_on_three_threads_have_the_bits_of_solo_requests(
    tmp_path: Path, recorder: Recorder
) -> None:
    """A third of the batch's activations ends within a row, and within a vector."""
    model = write_checkpoint(tmp_path, "gemma2", intermediate_size=256)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with closing(Core(model, kv_cache_config={"max_tokens": 1024, "enable_block_reuse": False})) as core:
            for prompt in PROMPTS:
                core.generate(prompt, 1)
            solo = recorder.take()
            core.run(*(core.add(prompt, 1) for prompt in PROMPTS))
            assert_same_bits(recorder.take(), solo)
    finally:
        torch.set_num_threads(before)


@thorough
def test_prompts_batched_in_another_order_after_others_give_the_same_bits(
    make_core: MakeCore, recorder: Recorder, solo: Logits
) -> None:
    core = make_core(max_batch_size=4)
    ids = []
    for prompt in reversed(PROMPTS):
        ids += [core.add([7, 8, 9], 30), core.add(prompt, NEW_TOKENS)]
        core.step()
    core.run(*ids)
    assert_same_bits(recorder.take(), solo)


@thorough
@pytest.mark.parametrize(
    ("max_num_tokens", "policy"),
    [
        (32, "FIRST_COME_FIRST_SERVED"),
        (70, "FIRST_COME_FIRST_SERVED"),
        (100, "EQUAL_PROGRESS"),
        (100, "FORCE_CHUNK"),
    ],
)
def test_logits_of_chunked_prompts_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits, max_num_tokens: int, policy: str
) -> None:
    by_turns = {"context_chunking_policy": policy}
    core = make_core(max_num_tokens=max_num_tokens, enable_chunked_prefill=True, scheduler_config=by_turns)
    core.run(*(core.add(prompt, NEW_TOKENS) for prompt in PROMPTS))
    assert_same_bits(recorder.take(), solo)


@pytest.mark.parametrize(
    ("way", "tokens_per_block"),
    # Transformers' modules take longest, and blocks are looked up alike for all.
    [
        *((("llama", "auto"), size) for size in (4, 16, 32, 64)),
        *(((family, "auto"), 4) for family in ("mistral", "gemma2")),
    ],
    indirect=["way"],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_logits_on_a_reused_prefix_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits, tokens_per_block: int
) -> None:
    """Block sizes below a tile: a reused prefix ends in the middle of one."""
    core = make_core(kv_cache_config={"max_tokens": 1024, "tokens_per_block": tokens_per_block})
    core.generate(STEM, 1)
    for _ in range(2):
        answers = [core.run(core.add(prompt, NEW_TOKENS)) for prompt in PROMPTS]
        assert answers[1].cached_tokens >= len(STEM) // tokens_per_block * tokens_per_block
        assert_same_bits(recorder.take(), solo)


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "taken over"])
@thorough
def test_logits_on_a_partly_reused_block_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits, copied: bool
) -> None:
    """The stem ends in the middle of a block, and of a tile."""
    core = make_core(
        kv_cache_config={"max_tokens": 1024, "tokens_per_block": 64, "copy_on_partial_reuse": copied}
    )
    longest, other = PROMPTS[1], PROMPTS[2]
    for prompt in (longest, other):
        answer = core.run(core.add(prompt, NEW_TOKENS))
    assert answer.cached_tokens == len(STEM)
    again = core.run(core.add(longest, NEW_TOKENS))
    assert again.cached_tokens == (128 if copied else 64)
    assert_same_bits(recorder.take(), only(solo, 1, 2))


@thorough
def test_a_prefix_found_in_a_longer_prompt_gives_the_same_bits(
    make_core: MakeCore, recorder: Recorder, solo: Logits
) -> None:
    """Its KV was computed in a tile that went on."""
    core = make_core(kv_cache_config={"max_tokens": 1024, "tokens_per_block": 16})
    for prompt in (PROMPTS[1], PROMPTS[6]):
        answer = core.run(core.add(prompt, NEW_TOKENS))
    assert answer.cached_tokens == len(PROMPTS[6]) - 1
    assert_same_bits(recorder.take(), only(solo, 1, 6))


def only(rows: Logits, *prompts: int) -> Logits:
    return {key: row for key, row in rows.items() if key[0] in prompts}


def crowded(swap_tokens: int, **args: Any) -> dict[str, Any]:
    """A pool that the answers do not fit into together."""
    return {
        "kv_cache_config": {"max_tokens": 160, "tokens_per_block": 4},
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "embedded": {"swap_tokens": swap_tokens},
        **args,
    }


def run_and_see_who_is_paused(core: Core, ids: list[int]) -> set[str]:
    kinds = set()
    while not all(core.answers[request_id, 0].done for request_id in ids):
        if core.engine.scheduler.receiving:
            # However slow the machine, what may run together does: KV comes before the next token.
            core.woken.wait(_ARRIVAL_SECONDS)
        core.wait()
        core.step()
        kinds |= {s.request_type for s in core.engine.scheduler.paused}
    assert not any(core.answers[request_id, 0].error for request_id in ids)
    return kinds


@pytest.mark.parametrize("swap_tokens", [0, 160], ids=["recomputed", "put aside"])
@thorough
def test_logits_after_preemption_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits, swap_tokens: int
) -> None:
    core = make_core(**crowded(swap_tokens))
    ids = [core.add([7 + i, 8, 9], 45) for i in range(4)]
    kinds = run_and_see_who_is_paused(core, ids + [core.add(prompt, NEW_TOKENS) for prompt in PROMPTS])
    assert kinds == {"context_and_generation"}
    assert_same_bits(recorder.take(), solo)


@thorough
def test_logits_in_scattered_blocks_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits
) -> None:
    """A sequence with scattered blocks is gathered, not viewed."""
    core = make_core(kv_cache_config={"max_tokens": 1024, "tokens_per_block": 16})
    blocks = core.engine.blocks
    taken = blocks.allocate(blocks.num_blocks)
    blocks.release(taken[::2])
    for prompt in PROMPTS:
        core.generate(prompt, NEW_TOKENS)
    blocks.release(taken[1::2])
    assert_same_bits(recorder.take(), solo)


@pytest.mark.parametrize("swap_tokens", [0, 160], ids=["recomputed", "put aside"])
@thorough
def test_logits_after_a_handoff_and_preemption_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits, swap_tokens: int
) -> None:
    """Without room to put it aside, decode computes for itself what prefill had sent."""
    transfer = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    small = crowded(swap_tokens)
    prefill = make_core(kv_cache_config={"max_tokens": 1024, "tokens_per_block": 4}, **transfer)
    decode = make_core(max_num_tokens=64, **small, **transfer)
    handoffs = [prefill.prefill(prompt) for prompt in PROMPTS]
    # Long enough that two that run together outgrow the pool.
    received = [decode.add_decode(p, h, 16) for p, h in zip(PROMPTS, handoffs, strict=True)]
    assert run_and_see_who_is_paused(decode, received) == {"generation_only"}
    assert_same_bits({key: row for key, row in recorder.take().items() if key in solo}, solo)


@pytest.mark.parametrize("backend", tuple(TRANSPORTS))
def test_logits_after_a_handoff_have_the_bits_of_solo_requests(
    make_core: MakeCore, recorder: Recorder, solo: Logits, backend: str
) -> None:
    transfer = {"cache_transceiver_config": {"backend": backend}}
    prefill = make_core(max_num_tokens=64, enable_chunked_prefill=True, **transfer)
    decode = make_core(**transfer)
    for _ in range(2):  # the second time with both caches warm
        handoffs = [prefill.prefill(prompt) for prompt in PROMPTS]
        decode.run(*(decode.add_decode(p, h, NEW_TOKENS) for p, h in zip(PROMPTS, handoffs, strict=True)))
        assert_same_bits(recorder.take(), solo)
        prefill.settle()
