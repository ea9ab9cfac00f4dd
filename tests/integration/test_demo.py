"""`trtllm-disagg demo`: what `make demo` shows, on a tiny model."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.conftest import Checkpoints

ROOT = Path(__file__).parents[2]


#: What every process of a deployment imports: ours, of the standard library, and of others.
PLANTED = ("yaml", "msgspec", "prometheus_client", "uvloop", "torch", "numba", "json", "argparse", "dynamo")


async def test_the_demo_shows_both_orders_and_that_they_agree(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Started in a directory with modules of other people, of which not one is run."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    command = [sys.executable, "-m", "trtllm_disagg", "demo", "--model", str(checkpoints("llama"))]
    command += ["--max-tokens", "12", "--engine-configs", str(ROOT / "engine_configs" / "demo")]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "80"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = (text.decode() for text in await asyncio.wait_for(process.communicate(), 200))

    assert process.returncode == 0, output + errors
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert "Both orders gave the same answer." in output
    assert [line[:2] for line in output.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3."]
    assert not [name for name in os.listdir(tmp_path) if name.startswith("trtllm-disagg-demo-")]
    for order in ("prefill_first", "decode_first"):
        assert f"{order}: the frontend sends the request to the" in output
    assert output.count("first token at the client after") == 2
    for span in ("compute", "handoff", "kv_transfer", "decode_steps"):
        assert (
            sum(line.split()[:1] == [span] or line.split()[1:2] == [span] for line in output.splitlines())
            >= 2
        ), span
    assert output.count("most of it: ") == 2
