"""Draws docs/pictures/demo.svg and trace.svg: `python -m scripts.pictures`. Needs requirements/release.txt."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from trtllm_disagg.tools.demo.both_orders import stream_chat, trace_of
from trtllm_disagg.tools.trace.waterfall import picture
from trtllm_disagg.tools.up.lifecycle import deployment_in_background
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.up_command import engine_configs_in

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 68, 200
#: rich would load its font from the network.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_COLOURS = {"brown": "yellow", "default": None}


def run(directory: Path) -> pyte.Screen:
    """Runs `trtllm-disagg demo`, and returns its last screen."""
    (directory / ".cache").symlink_to(ROOT / ".cache")
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-P", "-m", "trtllm_disagg", "demo"]
    environment = {**os.environ, "TERM": "xterm-256color", "TMPDIR": str(directory)}
    # stderr, with the processes' progress, stays on this program's terminal.
    process = subprocess.Popen(command, cwd=directory, stdin=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    # Reading fails once the last process has closed the terminal.
    with suppress(OSError):
        while read := os.read(ours, 65536):
            stream.feed(read)
    os.close(ours)
    if process.wait():
        raise SystemExit("error: the demo failed\n" + "\n".join(screen.display).strip())
    return screen


def text_of(screen: pyte.Screen) -> list[Text]:
    lines = []
    for row in range(ROWS):
        cells = [screen.buffer[row][column] for column in range(COLUMNS)]
        line = Text()
        for (colour, bold), same in groupby(cells, key=lambda cell: (cell.fg, cell.bold)):
            line.append("".join(cell.data for cell in same), Style(color=_colour(colour), bold=bold))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _colour(name: str) -> str | None:
    name = re.sub("^bright", "bright_", name)
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else _COLOURS.get(name, name)


def demo() -> str:
    with tempfile.TemporaryDirectory() as directory:
        lines = text_of(run(Path(directory)))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print("$ trtllm-disagg demo", style="bold", highlight=False)
    for line in lines:
        console.print(line)
    return _FONT_FACE.sub("", console.export_svg(title="trtllm-disagg demo", unique_id="demo"))


def trace() -> str:
    """An answer of the demo model under prefill_first, as `trtllm-disagg trace --html` draws it."""
    order, model = "prefill_first", str(ROOT / ".cache" / "demo-model")
    files = engine_configs_in(ROOT / "engine_configs" / "demo", order)
    with tempfile.TemporaryDirectory() as directory:
        config = DeploymentConfig(
            order, model, "demo", Path(directory), http_port=0, engine="embedded", engine_configs=files
        )
        with deployment_in_background(config) as deployed:
            for tokens in (2, 60):  # the first request also connects the engines
                answer = stream_chat(deployed.base_url, "demo", "What is a list?", max_tokens=tokens)
            return picture(trace_of(deployed, answer) or sys.exit("error: the workers wrote no spans"))


if __name__ == "__main__":
    for name, draw in (("demo", demo), ("trace", trace)):
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
