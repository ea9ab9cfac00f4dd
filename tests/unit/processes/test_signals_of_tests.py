"""A test that leaves signals ignored does so for itself alone."""

from __future__ import annotations

import signal

import pytest

from tests.support.signals import ENDING, signals_as_before


@pytest.mark.parametrize("number", ENDING)
def test_an_ignored_signal_is_heard_again_after_the_block(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    assert before is not signal.SIG_IGN
    with signals_as_before():
        signal.signal(number, signal.SIG_IGN)
    assert signal.getsignal(number) is before
