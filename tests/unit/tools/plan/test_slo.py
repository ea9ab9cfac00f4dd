"""--slo: what is understood, and what is refused by name."""

from __future__ import annotations

import pytest

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.plan.slo import Slo


def test_every_limit_that_is_given_is_kept() -> None:
    assert Slo.parse("ttft=500, tpot=30.5") == Slo(ttft=500, tpot=30.5)
    assert Slo.parse("latency=2000").limits == {"latency": 2000}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "NAME=MILLISECONDS"),
        ("500", "NAME=MILLISECONDS"),
        ("itl=30", "ttft, tpot, latency"),
        ("ttft=500,tpot", "NAME=MILLISECONDS"),
        ("ttft=500,ttft=30", "ttft once"),
        ("ttft=soon", "--slo ttft: 'soon'"),
        ("tpot=0", "--slo tpot: '0'"),
        ("tpot=-3", "above 0"),
        ("tpot=nan", "above 0"),
        ("tpot=inf", "above 0"),
    ],
)
def test_invalid_slo_is_refused_with_what_is_allowed(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Slo.parse(text)
    assert named in str(refused.value)
    assert "--slo" in str(refused.value)
