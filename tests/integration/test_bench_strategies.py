"""`bench strategies` from its flags to its report, cut off and gone on with: modelled engines behind the real frontend,
a load generator of our own in AIPerf's place.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

from tests.integration.test_modelled import write_model
from tests.support.fake_aiperf import command_in
from trtllm_disagg.tools.bench.strategies.planning import sensitivities
from trtllm_disagg.tools.bench.strategies.records import PointResult, RunDirectory, Sensitivity

pytestmark = pytest.mark.process

MEASURED: dict[str, Any] = {
    "step_ms": 6.0,
    "prefill_token_us": 150.0,
    "decode_token_us": 500.0,
    "kv_pool_tokens": 100_000,
    "kv_bytes_per_token": 100_000,
}
AGG, ORDER = "2 agg", "1P1D decode_first"
REQUESTS = 4
SIDES = sensitivities(0.5)


def write_inputs(directory: Path) -> None:
    write_model(directory / "model")
    content = {
        "max_seq_len": 1024,
        "enable_chunked_prefill": True,
        "cache_transceiver_config": {"backend": "NIXL"},
        "modelled": {"measured": MEASURED},
    }
    (directory / "configs").mkdir()
    for role in ("agg", "prefill", "decode"):
        (directory / "configs" / f"{role}.yaml").write_text(yaml.safe_dump(content))
    lines = [{"timestamp": 250 * i, "input_length": 300, "output_length": 24} for i in range(REQUESTS)]
    (directory / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command_in(directory)


@asynccontextmanager
async def bench(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    flags = ["--quick", "--arms", f"{AGG},{ORDER}", "--workloads", "trace", "--time-scale", "2"]
    flags += ["--rates", "4", "--requests", f"{REQUESTS}", "--trace", str(directory / "trace")]
    flags += ["--model", str(directory / "model"), "--engine-configs", str(directory / "configs")]
    flags += ["--aiperf", str(directory / "aiperf"), "--out", str(directory / "out")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trtllm_disagg", "bench", "strategies", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def test_a_run_that_is_interrupted_goes_on_and_ends_with_a_report(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    async with bench(tmp_path) as process:
        assert process.stderr is not None
        said = ""
        while f"{ORDER}: starting" not in said:
            line = (await process.stderr.readline()).decode()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        _, rest = await process.communicate()
    assert f"{2 * len(SIDES)} points in 2 deployments" in said
    assert process.returncode == 130, rest.decode()
    kept = f"{len(SIDES)} of {2 * len(SIDES)} points are kept, and the same command goes on from"
    assert kept in rest.decode()
    directory = RunDirectory(tmp_path / "out")
    before = {result.point: result for result in directory.results()}
    assert {point.arm for point in before} == {AGG}

    async with bench(tmp_path) as process:
        advice, said_again = await process.communicate()
    assert process.returncode == 0, said_again.decode()
    assert f"{len(SIDES)} points in 1 deployments" in said_again.decode()
    assert advice.startswith(b"trace on 2 GPUs: ")
    results = {result.point: result for result in directory.results()}
    assert results | before == results
    assert ORDER in (directory.path / "report.html").read_text()
    for arm in (AGG, ORDER):
        of_arm = {point.sensitivity: result for point, result in results.items() if point.arm == arm}
        assert set(of_arm) == set(SIDES)
        follows_the_factors(of_arm)
    moved = [request.parts for request in of_arm[SIDES[0]].answered if request.parts]
    assert len(moved) == REQUESTS
    assert all(part.transfer > 0 for part in moved)


def follows_the_factors(of_arm: dict[Sensitivity, PointResult]) -> None:
    """They were set while the deployment ran; by the engines' clock, which this machine's load does not move."""
    for phase in ("prefill", "decode"):
        fast, slow = (of_arm[side] for side in (Sensitivity(**{f"{phase}_factor": f}) for f in (0.5, 1.5)))
        # Three times as long, but for what requests wait for each other.
        assert 2 < part(slow, phase) / part(fast, phase) < 4.5


def part(result: PointResult, phase: str) -> float:
    return mean(float(getattr(request.parts, phase)) for request in result.answered if request.parts)
