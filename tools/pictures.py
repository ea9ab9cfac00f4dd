"""Makes docs/pictures/demo.svg: the demo on a terminal of 100 columns. Needs requirements/release.txt.

python -m tools.pictures
"""

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

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 100, 200
#: rich loads its font from the network.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_COLOURS = {"brown": "yellow", "default": None}


def run(directory: Path) -> pyte.Screen:
    """The screen at the end of `trtllm-disagg demo`."""
    (directory / ".cache").symlink_to(ROOT / ".cache")
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-P", "-m", "trtllm_disagg", "demo"]
    environment = {**os.environ, "TERM": "xterm-256color", "TMPDIR": str(directory)}
    process = subprocess.Popen(
        command, cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    # At the end, when the last process has closed the terminal, reading fails.
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


if __name__ == "__main__":
    (FOLDER / "demo.svg").write_text(demo(), encoding="utf-8")
