"""The tutorial does what it says: its blocks, as they stand there, in one shell, with what they print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.deployments import demo_model
from trtllm_disagg.tools.up.ports import free_system_ports

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial" / "index.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_END = "--- end of block"


class Block(NamedTuple):
    commands: str
    #: With `...` for any text; None when the page shows none.
    output: str | None


def blocks() -> list[Block]:
    found: list[Block] = []
    for kind, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "text":
            found[-1] = found[-1]._replace(output=text)
        else:
            assert kind == "bash", f"a block of kind {kind!r} would not be run"
            found.append(Block(text, None))
    return found


def pattern(shown: str) -> str:
    return ".*".join(re.escape(part) for part in shown.strip().split("..."))


def test_every_block_of_the_tutorial_does_what_the_page_shows(tmp_path: Path) -> None:
    model = demo_model()
    (tmp_path / ".cache").mkdir()
    links = {".venv": Path(sys.prefix), ".cache/demo-model": model, "engine_configs": ROOT / "engine_configs"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    port = str(free_system_ports(1)[0])
    script = "".join(f"{block.commands}echo '{_END}'\n" for block in blocks()).replace("8000", port)

    command = ["bash", "-e", "-u", "-o", "pipefail", "-c", script]
    shell = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = shell.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # `up` outlives a shell that fails, and stops its workers when it is told to.
            os.killpg(shell.pid, signal.SIGTERM)
    told = output + errors + "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert shell.returncode == 0, told
    printed = output.replace(port, "8000").split(f"{_END}\n")[:-1]
    for block, real in zip(blocks(), printed, strict=True):
        if block.output is not None:
            assert re.fullmatch(pattern(block.output), real.strip(), re.DOTALL), f"{block.commands}\n{real}"
