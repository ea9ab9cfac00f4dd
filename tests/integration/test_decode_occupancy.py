"""decode_occupancy on a running deployment: the decode worker's load comes over Dynamo, and decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.integration.test_conditional import command, took
from tests.parity.cases import ids
from tests.parity.conftest import oracle  # noqa: F401 - a fixture
from tests.parity.oracle import Oracle
from tests.support.deployments import Served, demo_config, served, wait_until

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ("--prefill-decider", "decode_occupancy", "--decode-busy-threshold", "0")
    run_dir = tmp_path_factory.mktemp("occupancy") / "run"
    with served(demo_config("prefill_first", run_dir, worker_args=arguments)) as deployment:
        yield deployment


def asked(deployment: Served, oracle: Oracle) -> tuple[str, str]:  # noqa: F811
    number = next(_NUMBERS)
    return took(deployment, oracle, ids(60, seed=3000 + number), f"occupancy-{number}")


def test_requests_are_kept_while_decode_counts_as_full(deployment: Served, oracle: Oracle) -> None:  # noqa: F811
    """At threshold 0 a decode worker is full that uses no block; the first request finds no load told yet."""
    assert asked(deployment, oracle) == ("prefill_first", "load_unknown")
    wait_until(
        lambda: asked(deployment, oracle) == ("local", "decode_busy"), "the prefill worker keeps requests"
    )

    ended = command("set", "--run-dir", str(deployment.deployment.run_dir), "--decode-busy-threshold", "1")

    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: asked(deployment, oracle) == ("prefill_first", "decode_free"), "decode has room again")
    (worker,) = deployment.first_stage
    reasons = worker.labels("trtllm_disagg_requests_total", "reason")
    assert reasons >= {"load_unknown", "decode_busy", "decode_free"}
    deployment.wait_until_idle()
