"""A step that does not return ends its engine, by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoints
from trtllm_disagg.engines.embedded import LLM, RequestError, SamplingParams
from trtllm_disagg.engines.embedded.core.core_process import StepWatch


class Failures:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.came = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.came.set()


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
def watch(failures: Failures) -> Iterator[StepWatch]:
    watch = StepWatch(0.2, failures)
    yield watch
    watch.close()


def test_hanging_step_is_reported_once(watch: StepWatch, failures: Failures) -> None:
    with watch:
        assert failures.came.wait(10)
    assert failures.reasons == ["a step has not ended after 0.2 s (embedded.step_timeout_seconds)"]


def test_short_steps_and_a_pause_are_not_reported_as_a_hang(failures: Failures) -> None:
    watch = StepWatch(1.0, failures)
    for _ in range(100):
        with watch:
            failures.came.wait(0.01)
    assert not failures.came.wait(1.2)
    watch.close()


def test_an_engine_whose_step_takes_too_long_ends_with_its_cause(checkpoints: Checkpoints) -> None:
    """So short a time that any of a thousand steps is longer: the watch may get no core during the first ones."""
    with (
        LLM(checkpoints(), max_seq_len=2048, embedded={"step_timeout_seconds": 1e-5}) as llm,
        pytest.raises(RequestError, match=r"a step has not ended after 1e-05 s"),
    ):
        llm.generate([1] * 1000, SamplingParams(max_tokens=1000))
