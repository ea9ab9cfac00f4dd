"""`bench strategies` from its flags to its page, cut off and gone on with: modelled engines behind the real frontend, a
load generator of our own in AIPerf's place.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.test_modelled import write_model
from tests.support.fake_aiperf import command_in

pytestmark = pytest.mark.process

MEASURED: dict[str, Any] = {
    "step_ms": 6.0,
    "prefill_token_us": 150.0,
    "decode_token_us": 500.0,
    "kv_pool_tokens": 100_000,
    "kv_bytes_per_token": 100_000,
}
AGG, ORDER = "2 agg", "1P1D decode_first"


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
    command_in(directory)


@asynccontextmanager
async def bench(directory: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    flags = ["--workers", "2", "--layouts", f"{AGG},{ORDER}", "--workloads", "256:64", "--time-scale", "2"]
    flags += ["--rates", "4,8", "--requests", "4", "--engine-configs", str(directory / "configs")]
    flags += ["--model", str(directory / "model"), "--slo", "ttft=60000,tpot=1000"]
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


async def test_a_run_that_is_interrupted_goes_on_and_ends_with_a_page(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    async with bench(tmp_path) as process:
        assert process.stderr is not None
        seen = ""
        while f"{ORDER}: starting" not in seen:
            line = (await process.stderr.readline()).decode()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        _, later = await process.communicate()
    assert process.returncode == 130, later.decode()
    assert "the same command goes on" in later.decode()
    assert {row["layout"] for row in json.loads((tmp_path / "out" / "results.json").read_text())} == {AGG}

    async with bench(tmp_path) as process:
        page, seen_again = await process.communicate()
    assert process.returncode == 0, seen_again.decode()
    assert f"{AGG}: starting" not in seen_again.decode()
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(row["layout"], row["rate"], row["goodput"]) for row in rows] == [
        (layout, rate, rate) for layout in (AGG, ORDER) for rate in (4.0, 8.0)
    ]
    # A step of one decoding request takes 6.5 ms on the modelled clock, and 13 on the wall's.
    assert all(6 < row["tpot_p50"] < 60 for row in rows)
    assert page.decode().strip() == str(tmp_path / "out" / "results.html")
    assert ORDER in (tmp_path / "out" / "results.html").read_text()
