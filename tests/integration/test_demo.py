"""`trtllm-disagg demo`: what `make demo` shows, on a tiny model."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.conftest import Checkpoints

ROOT = Path(__file__).parents[2]


async def test_the_demo_shows_both_orders_and_that_they_agree(checkpoints: Checkpoints) -> None:
    command = (sys.executable, "-m", "trtllm_disagg", "demo", "--model", str(checkpoints("llama")))
    process = await asyncio.create_subprocess_exec(
        *command,
        "--max-tokens",
        "12",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = (text.decode() for text in await asyncio.wait_for(process.communicate(), 200))

    assert process.returncode == 0, output + errors
    assert "Both orders gave the same answer." in output
    for order in ("prefill_first", "decode_first"):
        assert f"{order}: the frontend sends the request to the" in output
    assert output.count("gave token 1") == 2
    assert output.count("first token at the client after") == 2
    assert output.count("handoff (KV moved to decode") == 2
