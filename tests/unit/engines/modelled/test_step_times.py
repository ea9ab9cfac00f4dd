"""How long steps take: of one request, of a batch, with factors, of ranks, and on a clock that is late."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.modelled_cores import MEASURED, ModelledTestCore, VirtualClock, model_directory, prompt_of
from trtllm_disagg.engines.modelled import LLM, build
from trtllm_disagg.engines.modelled.config import ModelledArgs, ModelledConfig
from trtllm_disagg.engines.modelled.core import ScaledClock
from trtllm_disagg.errors import ConfigError

STEP, TOKEN, CONTEXT = 2e-3, 10e-6, 1e-6
DECODE, DECODE_CONTEXT = 100e-6, 10e-6


def prefill_seconds(tokens: int, before: int = 0) -> float:
    return STEP + tokens * TOKEN + tokens * (before + tokens / 2) / 1024 * CONTEXT


def decode_seconds(count: int, context: int) -> float:
    return STEP + count * (DECODE + context / 1024 * DECODE_CONTEXT)


def test_ttft_and_itl_of_one_request_are_the_sums_of_their_steps() -> None:
    core = ModelledTestCore(max_num_tokens=256)
    moments = core.seconds_of(prompt_of(600), 4)
    prefill = prefill_seconds(256) + prefill_seconds(256, 256) + prefill_seconds(88, 512)
    assert moments[0] == pytest.approx(prefill, rel=1e-9)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert gaps == pytest.approx([decode_seconds(1, 600 + i) for i in range(3)], rel=1e-9)


def test_cached_prefix_adds_no_modelled_time() -> None:
    core = ModelledTestCore()
    core.generate(prompt_of(600), 2)
    first = core.seconds_of(prompt_of(600), 1)[0]
    assert first == pytest.approx(prefill_seconds(600 - 576, 576), rel=1e-9)


def test_a_mixed_step_is_the_sum_of_its_parts() -> None:
    core = ModelledTestCore()
    running = core.add(prompt_of(100), 20)
    core.step()
    begun = core.clock.now()
    core.add(prompt_of(200, salt=1), 1)
    core.step()
    expected = prefill_seconds(200) + DECODE + 100 / 1024 * DECODE_CONTEXT
    assert core.clock.now() - begun == pytest.approx(expected, rel=1e-9)
    core.run(running)


@pytest.mark.parametrize(
    ("factors", "prefill", "decode"),
    [({"prefill_factor": 1.5}, 1.5, 1.0), ({"decode_factor": 0.5}, 1.0, 0.5)],
)
def test_factors_stretch_prefill_and_decode_apart(
    factors: dict[str, float], prefill: float, decode: float
) -> None:
    core = ModelledTestCore(modelled=factors)
    moments = core.seconds_of(prompt_of(64), 2)
    assert moments[0] == pytest.approx(prefill * prefill_seconds(64), rel=1e-9)
    assert moments[1] - moments[0] == pytest.approx(decode * decode_seconds(1, 64), rel=1e-9)


def test_ranks_of_attention_dp_share_requests_and_the_slowest_ends_the_step() -> None:
    core = ModelledTestCore(tensor_parallel_size=2, enable_attention_dp=True)
    begun = core.clock.now()
    ids = [core.add(prompt_of(64 * (i + 1), salt=i), 1) for i in range(3)]
    core.step()
    # The first and the third are on one rank.
    expected = STEP + (64 + 192) * TOKEN + (64 * 32 + 192 * 96) / 1024 * CONTEXT
    assert core.clock.now() - begun == pytest.approx(expected, rel=1e-9)
    core.run(*ids)


def test_requests_that_run_are_not_delayed_by_what_this_process_does_between_steps() -> None:
    clock = VirtualClock()
    core = ModelledTestCore(clock)
    request = core.add(prompt_of(64), 3)
    begun = clock.now()
    while not core.answers[request, 0].done:
        core.step()
        clock.time += 1e-4  # as its own software would take
    expected = prefill_seconds(64) + decode_seconds(1, 64) + decode_seconds(1, 65)
    assert clock.now() - 1e-4 - begun == pytest.approx(expected, rel=1e-6)


def test_idle_time_is_not_caught_up() -> None:
    clock = VirtualClock()
    core = ModelledTestCore(clock)
    core.generate(prompt_of(64), 1)
    clock.time += 5.0
    assert core.seconds_of(prompt_of(64, salt=3), 1)[0] == pytest.approx(prefill_seconds(64), rel=1e-9)


def test_late_modelled_step_reports_its_lateness() -> None:
    clock = VirtualClock()
    core = ModelledTestCore(clock)
    core.add(prompt_of(64), 3)
    core.step()
    clock.time += 1.0
    core.step()
    told = core.stats[-1]["modelled"]
    assert told["stepMS"] == pytest.approx(1000 * decode_seconds(1, 64))
    assert told["lateMS"] == pytest.approx(1000 * (1.0 - decode_seconds(1, 64)))
    assert told["timeScale"] == 1.0


def test_statistics_and_measurements_are_in_modelled_time() -> None:
    core = ModelledTestCore()
    arrived = core.clock.now()
    request = core.add(prompt_of(64), 2, arrived=arrived)
    core.step()
    assert core.stats[-1]["iterLatencyMS"] == pytest.approx(1000 * prefill_seconds(64))
    outputs = core.step()
    measured = outputs[0].measured
    assert measured is not None
    assert measured.first_token - arrived == pytest.approx(prefill_seconds(64))
    assert measured.last_token - measured.first_token == pytest.approx(decode_seconds(1, 64))
    core.run(request)


def test_a_scaled_clock_is_slower() -> None:
    fast, slow = ScaledClock(1.0), ScaledClock(4.0)
    begun = fast.now()
    assert slow.now() == pytest.approx(begun / 4, abs=1e-3)
    slow.wait_until(slow.now() + 0.01)
    assert fast.now() - begun >= 0.04


_REQUESTS = st.lists(
    st.tuples(st.integers(1, 400), st.integers(1, 12), st.integers(0, 3), st.integers(0, 6)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=30)
@given(
    requests=_REQUESTS,
    aborts=st.lists(st.integers(0, 7), max_size=3),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    pool=st.sampled_from([448, 1024, 4096]),
)
def test_modelled_time_never_runs_backwards_and_no_block_is_lost(
    requests: list[tuple[int, int, int, int]], aborts: list[int], policy: str, pool: int
) -> None:
    """Each: tokens of the prompt and of the answer, which prefix it shares, and steps before it comes."""
    core = ModelledTestCore(
        kv_cache_config={"max_tokens": pool},
        max_num_tokens=128,
        max_batch_size=4,
        scheduler_config={"capacity_scheduler_policy": policy},
    )
    moments = [core.clock.now()]
    ids: list[int] = []

    def step() -> None:
        core.step()  # checks the blocks
        moments.append(core.clock.now())

    for length, max_tokens, salt, steps in requests:
        ids.append(core.add(prompt_of(length, salt), max_tokens))
        for _ in range(steps):
            step()
    for index in aborts:
        if index < len(ids):
            core.engine.abort(ids[index])
    while not all(answer.done for answer in core.answers.values()):
        step()
    assert moments == sorted(moments)
    assert core.engine.blocks.num_available == core.engine.blocks.num_blocks
    assert all(answer.error is None for answer in core.answers.values())
    core.close()


def test_modelled_text_does_not_depend_on_other_requests() -> None:
    alone = ModelledTestCore().generate(prompt_of(100), 12)
    core = ModelledTestCore(max_num_tokens=64, max_batch_size=3)
    ids = [core.add(prompt_of(100, salt), 12) for salt in range(5)]
    core.run(*ids)
    assert core.answers[ids[0], 0].tokens == alone
    assert len({tuple(core.answers[i, 0].tokens) for i in ids}) == 5


def test_a_prompt_that_ends_with_the_start_of_an_answer_goes_on_with_the_rest() -> None:
    core = ModelledTestCore()
    answer = core.generate(prompt_of(50), 10)
    assert core.generate(prompt_of(50) + answer[:4], 6) == answer[4:]


def test_pool_has_the_measured_size_unless_max_tokens_bounds_it() -> None:
    assert ModelledTestCore().engine.blocks.num_blocks == MEASURED["kv_pool_tokens"] // 32
    bounded = ModelledTestCore(kv_cache_config={"max_tokens": 640})
    assert bounded.engine.blocks.num_blocks == 20


# -- settings


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"modelled": {"sytem": "h100_sxm"}}, r"modelled\.sytem: .* no such key.*system"),
        ({"modelled": {"time_scale": 0.05}}, r"modelled\.time_scale: 0\.05 is not allowed; .*or equal to 0\.1"),
        ({"modelled": {"measured": {"step_ms": -1}}}, r"modelled\.measured\.step_ms: -1 is not allowed"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size: 2 is not allowed; .*on the modelled engine"),
        ({"guided_decoding_backend": "llguidance"}, r"guided_decoding_backend: .*no model follows a grammar"),
        ({"embedded": {"num_threads": 2}}, r"embedded: .* expected no value, on the modelled engine"),
        ({"model": "/nowhere/at/all"}, r"model: '/nowhere/at/all' is not allowed; .*config\.json"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(**({"model": model_directory()} | args))


@pytest.mark.parametrize("own", [{}, {"measured": MEASURED, "model": "llama-3.1-8b"}])
def test_without_the_tables_the_way_to_them_is_named(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PACKAGE", "no_such_package")
    args = ModelledArgs(model=model_directory(), modelled=ModelledConfig(**own))
    with pytest.raises(ConfigError, match=r"pip install 'trtllm-disagg\[modelled\]'"):
        build.build_core(args, lambda: None, ModelledTestCore().clock)


def test_a_sequence_is_no_longer_than_the_modelled_models() -> None:
    with pytest.raises(ConfigError, match=r"max_seq_len: 4096 is not allowed; expected at most .*2048"):
        ModelledTestCore(max_seq_len=4096)


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens: 16 is not allowed; .* 32"):
        ModelledTestCore(kv_cache_config={"max_tokens": 16})
