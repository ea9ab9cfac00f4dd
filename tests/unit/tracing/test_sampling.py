"""Which requests are traced: as OpenTelemetry and Dynamo read the same variables."""

from __future__ import annotations

import secrets

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tracing.spans import TraceParent
from trtllm_disagg.tracing.tracer import sampler_of

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
YES, NO = (TraceParent(TRACE_ID, "00f067aa0ba902b7", sampled) for sampled in (True, False))


@pytest.mark.parametrize(
    ("variables", "alone", "below_yes", "below_no"),
    [
        ({}, True, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, True, True, True),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, False, False, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, False, True, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False, False, False),
        ({"OTEL_TRACES_SAMPLER": "traceidratio"}, True, True, True),
        ({"OTEL_TRACES_SAMPLE_RATIO": "0"}, False, True, False),
        ({"OTEL_TRACES_SAMPLER": "always_on", "OTEL_TRACES_SAMPLE_RATIO": "0"}, True, True, True),
    ],
)
def test_sampler_decision_for_each_otel_setting_and_parent(
    variables: dict[str, str], alone: bool, below_yes: bool, below_no: bool
) -> None:
    sampler = sampler_of(variables)
    assert [sampler(TRACE_ID, parent) for parent in (None, YES, NO)] == [alone, below_yes, below_no]


def test_ratio_sampler_chooses_the_ids_that_opentelemetrys_does() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    ours = sampler_of({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.3"})
    theirs = TraceIdRatioBased(0.3)
    ids = [secrets.token_hex(16) for _ in range(1000)]
    chosen = [each for each in ids if ours(each, None)]
    sampled = Decision.RECORD_AND_SAMPLE
    assert chosen == [i for i in ids if theirs.should_sample(None, int(i, 16), "request").decision is sampled]
    assert 0 < len(chosen) < 1000


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_TRACES_SAMPLE_RATIO": "1%"}, "OTEL_TRACES_SAMPLE_RATIO"),
    ],
)
def test_invalid_sampler_variable_is_refused_by_name(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}\b.*expected"):
        sampler_of(variables)
