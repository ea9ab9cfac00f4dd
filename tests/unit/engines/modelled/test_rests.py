"""A process that rests while the modelled GPU makes tokens of which no client hears: times and answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.modelled_cores import ModelledTestCore, VirtualClock, prompt_of
from trtllm_disagg.engines.embedded.connector.connector import KvConnector, KvEvent
from trtllm_disagg.engines.embedded.ipc.messages import SamplingSpec

INTERVAL = 64
#: The longest rest, as the process has it.
REST = 0.05


class Driver:
    """Does what the engine's process does. `rests`: or it is awake all the time."""

    def __init__(self, rests: bool, **args: Any) -> None:
        self.clock = VirtualClock()
        self.core = ModelledTestCore(self.clock, **args)
        self.rests = rests
        self.told: dict[int, list[tuple[float, int]]] = {}
        self.num_steps = 0

    def run_until(self, moment: float) -> None:
        """Or until there is nothing to do."""
        while self.clock.time < moment and self.core.engine.has_work:
            assert self.num_steps < 10_000, "it goes nowhere"
            rest = self.core.engine.rest()
            if self.rests and rest:
                self.clock.time = min(moment, self.clock.time + rest)
                if self.clock.time == moment:
                    return  # a command comes
            self.step()

    def step(self) -> None:
        self.num_steps += 1
        for output in self.core.step():
            self.told.setdefault(output.request_id, []).append((self.clock.time, len(output.token_ids)))

    def serve(self, arrivals: list[tuple[float, int, int]]) -> dict[int, list[tuple[float, int]]]:
        begun = self.clock.time
        for i, (at, prompt, answer) in enumerate(arrivals):
            self.run_until(begun + at)
            self.clock.time = max(self.clock.time, begun + at)
            self.core.add(prompt_of(prompt, salt=i), answer, stream_interval=INTERVAL)
        self.run_until(float("inf"))
        self.core.assert_idle()
        return self.told


def decoding() -> tuple[VirtualClock, ModelledTestCore, int]:
    """An engine with a request that has its first token, and tells of the next ones together."""
    clock = VirtualClock()
    core = ModelledTestCore(clock)
    request = core.add(prompt_of(64), INTERVAL, stream_interval=INTERVAL)
    core.step()
    return clock, core, request


_ARRIVALS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6
).map(sorted)


#: As they come, one at a time, ranks with requests of their own, blocks taken and lost step by step.
_ENGINES: list[dict[str, Any]] = [
    {},
    {"max_batch_size": 1},
    {"tensor_parallel_size": 2, "enable_attention_dp": True},
    {
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "kv_cache_config": {"max_tokens": 640},
    },
]


@settings(deadline=None, max_examples=50)
@given(_ARRIVALS, st.sampled_from(_ENGINES))
def test_outputs_come_at_the_same_times_with_and_without_rests(
    arrivals: list[tuple[float, int, int]], engine: dict[str, Any]
) -> None:
    awake, resting = Driver(rests=False, **engine), Driver(rests=True, **engine)
    told = awake.serve(arrivals), resting.serve(arrivals)
    assert told[0].keys() == told[1].keys()
    for one, other in zip(*(each.values() for each in told), strict=True):
        assert [tokens for _, tokens in one] == [tokens for _, tokens in other]
        assert [at for at, _ in one] == pytest.approx([at for at, _ in other], abs=1e-9)
    cores = awake.core, resting.core
    assert _tokens(cores[0]) == _tokens(cores[1])
    assert _stored_blocks(cores[0]) == _stored_blocks(cores[1])
    for key in ("iter", "iterLatencyMS", "numNewActiveRequests", "numCompletedRequests", "totals"):
        one, other = ([record[key] for record in core.stats if record["modelled"]] for core in cores)
        assert one == (pytest.approx(other) if key == "iterLatencyMS" else other)
    one, other = ([record["modelled"]["stepMS"] for record in core.stats] for core in cores)
    assert one == pytest.approx(other)


def _tokens(core: ModelledTestCore) -> list[list[int]]:
    return [answer.tokens for answer in core.answers.values()]


def _stored_blocks(core: ModelledTestCore) -> list[Any]:
    stored = [event["data"]["blocks"] for event in core.events if event["data"]["type"] == "stored"]
    return sorted(block["block_hash"] for blocks in stored for block in blocks)


def test_undelivered_tokens_are_computed_in_few_steps_of_the_process() -> None:
    driver = Driver(rests=True)
    driver.serve([(0.0, 100, 2 * INTERVAL)])
    awake = Driver(rests=False)
    awake.serve([(0.0, 100, 2 * INTERVAL)])
    assert awake.num_steps >= 2 * INTERVAL
    assert driver.num_steps * 5 < awake.num_steps
    assert len(driver.core.stats) == len(awake.core.stats)


@pytest.mark.parametrize(
    "request_of",
    [
        {"stream_interval": 1},
        {
            "stream_interval": INTERVAL,
            "sampling": SamplingSpec(max_tokens=100, stop_words=((7,),), stop_reasons=(7,)),
        },
        {"stream_interval": INTERVAL, "sampling": SamplingSpec(max_tokens=100, end_ids=(3,))},
    ],
    ids=["each token is told", "a stop word may end it", "an end token may end it"],
)
def test_engine_does_not_rest_while_any_token_may_be_delivered(request_of: dict[str, Any]) -> None:
    core = ModelledTestCore()
    request = core.add(prompt_of(64), 100, **request_of)
    core.step()
    assert core.engine.rest() == 0.0
    core.run(request)


def test_while_a_prompt_is_computed_there_is_no_rest() -> None:
    core = ModelledTestCore(max_num_tokens=128)
    first = core.add(prompt_of(64), 200, stream_interval=INTERVAL)
    core.step()
    second = core.add(prompt_of(300, salt=1), 4)
    core.step()
    assert core.engine.rest() == 0.0
    core.run(first, second)


def test_a_rest_ends_before_statistics_are_old() -> None:
    core = ModelledTestCore(modelled={"time_scale": 10.0})
    request = core.add(prompt_of(64), 200, stream_interval=200)
    core.step()
    assert core.engine.rest() == REST
    core.step()
    core.run(request)


def test_only_steps_with_delivered_tokens_count_as_late() -> None:
    clock, core, request = decoding()
    begun = len(core.stats)
    clock.time += core.engine.rest()
    core.step()
    rested = core.stats[begun:]
    assert len(rested) > 5
    assert [each["modelled"]["lateMS"] for each in rested] == pytest.approx([0.0] * len(rested), abs=1e-9)
    assert [each["iterLatencyMS"] for each in rested] == pytest.approx(
        [s["modelled"]["stepMS"] for s in rested]
    )

    clock.time += core.engine.rest() + 1.0
    core.step()
    assert core.answers[request, 0].done
    assert core.stats[-1]["modelled"]["lateMS"] > 900.0


class CountedPolls(KvConnector):
    """Nothing happens in it."""

    polls = 0
    is_asking = False

    def poll(self) -> Iterator[KvEvent]:
        self.polls += 1
        return iter(())

    @property
    def has_news(self) -> bool:
        return self.is_asking


@pytest.fixture
def polled() -> tuple[ModelledTestCore, CountedPolls]:
    """With a request that decodes."""
    core, connector = ModelledTestCore(), CountedPolls()
    core.engine.connector = connector
    core.add(prompt_of(64), 500, stream_interval=500)
    core.step()
    connector.polls = 0
    return core, connector


def test_kv_that_comes_during_a_rest_waits_for_the_step_that_runs_then(
    polled: tuple[ModelledTestCore, CountedPolls],
) -> None:
    core, connector = polled
    assert core.engine.rest() > 0
    core.clock.wait_until(core.clock.now() + 0.01)
    core.step()
    assert connector.polls == 0
    core.step()
    assert connector.polls == 1


def test_while_the_connector_has_something_to_do_there_is_no_rest(
    polled: tuple[ModelledTestCore, CountedPolls],
) -> None:
    core, connector = polled
    connector.is_asking = True
    assert core.engine.rest() == 0.0


def test_late_process_batches_silent_steps_and_reports_its_lateness() -> None:
    clock, core, request = decoding()
    num_before = len(core.stats)
    clock.time += 0.05
    core.step()
    seconds = 2e-3 + 100e-6 + 64 / 1024 * 10e-6
    late = core.stats[num_before:]
    assert len(late) == pytest.approx(0.05 / seconds, abs=2)
    behind = 0.05 - sum(each["modelled"]["stepMS"] for each in late) / 1000
    assert [each["modelled"]["lateMS"] for each in late] == pytest.approx([1000 * behind] * len(late))
    core.run(request)


def test_a_request_that_comes_to_a_late_process_is_in_its_next_step() -> None:
    clock, core, first = decoding()
    clock.time += 0.05
    second = core.add(prompt_of(64, salt=1), 1)
    core.step()
    assert core.answers[second, 0].done
    core.run(first)


def test_cancel_during_a_rest_is_delivered_before_the_next_rest() -> None:
    clock, core, request = decoding()
    other = core.add(prompt_of(64, salt=1), 500, stream_interval=500)
    core.step()
    assert core.engine.rest() > 0
    clock.time += 0.01
    core.engine.abort(request)
    core.step()  # what had begun
    assert core.engine.rest() == 0.0
    core.step()
    assert core.answers[request, 0].finish_reason == "cancelled"
    core.run(other)


def test_refusal_during_a_rest_is_delivered_before_the_next_rest() -> None:
    clock, core, request = decoding()
    assert core.engine.rest() > 0
    clock.time += 0.01
    refused = core.add(prompt_of(64, salt=1), 100_000)
    core.step()  # what had begun
    assert core.engine.rest() == 0.0
    core.step()
    assert core.answers[refused, 0].error is not None
    core.run(request)
