"""How long a process that died waits, and when it is given up."""

from trtllm_disagg.tools.up.managed_process import Deaths
from trtllm_disagg.tools.up.plan import Backoff


def delays(deaths: Deaths, ready: list[float | None]) -> list[float]:
    waited = []
    for seconds in ready:
        deaths.count(seconds)
        waited.append(deaths.delay)
    return waited


def test_delays_double_up_to_the_longest() -> None:
    deaths = Deaths(Backoff(attempts=100))

    assert delays(deaths, [10.0, *[None] * 6]) == [1, 2, 4, 8, 16, 30, 30]


def test_restart_delay_resets_after_the_steady_time_only() -> None:
    deaths = Deaths(Backoff(steady=60.0))

    assert delays(deaths, [5.0, 59.0, 60.0, 5.0]) == [1, 2, 1, 2]


def test_only_consecutive_failed_starts_end_restarts() -> None:
    deaths = Deaths(Backoff(attempts=2))

    delays(deaths, [5.0, None, 5.0, None])
    assert not deaths.is_hopeless

    deaths.count(None)
    assert deaths.is_hopeless
