"""A prefill without a client stops at the next step, and what comes after it waits for one step at most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.support.meeting import Duo
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.config.engine_args import build_engine_args
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs

NUM_LONG = 10
LONG = 1500
#: What a worker gives its engine when it was told nothing about steps.
DEFAULTS = LlmArgs(**build_engine_args(WorkerConfig(model="org/model", role=Role.AGG, engine="embedded")))
STEP = DEFAULTS.max_num_tokens


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints()


def core_of_a_worker(model: Path, **more: object) -> Core:
    return Core(
        model,
        max_num_tokens=STEP,
        enable_chunked_prefill=DEFAULTS.enable_chunked_prefill,
        max_seq_len=2048,
        max_batch_size=32,
        kv_cache_config={"max_tokens": 32 * 1024},
        **more,
    )


@pytest.fixture(scope="module", params=["context_and_generation", "context_only"])
def core(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Core, str]]:
    backend = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    core = core_of_a_worker(model, **backend)
    yield core, request.param
    core.close()


def computed(core: Core) -> int:
    """Prompt tokens that went through the model until now."""
    return sum(stat["inflightBatchingStats"]["numCtxTokens"] for stat in core.stats)


def test_a_worker_on_the_embedded_engine_computes_long_prompts_in_short_steps() -> None:
    assert DEFAULTS.enable_chunked_prefill
    assert STEP == 512


def test_after_cancelled_prefills_the_next_step_is_for_the_next_request(core: tuple[Core, str]) -> None:
    engine, kind = core
    cancelled = [
        engine.add(prompt(LONG, salt=i), request_type=kind, sampling=SamplingSpec(max_tokens=1))
        for i in range(NUM_LONG)
    ]
    engine.step()
    for request_id in cancelled:
        engine.engine.abort(request_id)
    asked = engine.add(prompt(20, salt=77), 4)

    before = computed(engine)
    assert before <= STEP
    engine.step()

    assert computed(engine) - before == 20
    assert len(engine.answers[asked, 0].tokens) == 1
    assert {engine.answers[each, 0].finish_reason for each in cancelled} == {"cancelled"}
    assert len(engine.run(asked).tokens) == 4
    engine.assert_idle()


def test_a_cancelled_prefill_that_is_pushed_stops_at_the_next_step(model: Path) -> None:
    backend = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}}
    prefill, decode = (core_of_a_worker(model, **backend) for _ in range(2))
    duo = Duo(prefill, decode)
    try:
        met = [duo.both(prompt(LONG, salt=i)) for i in range(3)]
        duo.run_until(lambda: computed(prefill) > 0)
        before = computed(prefill)
        assert before < LONG

        for each in met:
            for core, request_id in ((prefill, each.prefill), (decode, each.decode)):
                assert request_id is not None
                core.engine.abort(request_id)

        duo.assert_idle()
        assert computed(prefill) == before
    finally:
        duo.close()
