"""Makes docs/pictures/: screens of real runs on a terminal of 100 columns, and the trace of a request.
Needs requirements/release.txt.

python -m tools.pictures [demo up doctor trace]
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from trtllm_disagg.engines.demo_model.recipe import DEFAULT_DIRECTORY
from trtllm_disagg.tools.demo import QUESTION
from trtllm_disagg.tools.demo.both_orders import stream_chat
from trtllm_disagg.tools.up.lifecycle import deployment_in_background
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.up_command import engine_configs_in

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 100, 200
#: rich loads its font from the network.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_COLOURS = {"brown": "yellow", "default": None}


class Shot(NamedTuple):
    #: The arguments of `trtllm-disagg`, run in the root of the repository.
    arguments: str
    #: A pattern for a line. When the screen shows it, the picture is taken and the command is interrupted. None: the
    #: picture is taken when the command ends.
    until: str | None = None


SHOTS = {
    "demo": Shot("demo"),
    "up": Shot(
        "up --strategy prefill_first --model .cache/demo-model --engine-configs engine_configs/demo --http-port 0"
        " --prefill-workers 2",
        r"frontend +\d+ +ready",
    ),
    "doctor": Shot(
        "doctor engine_configs/llama-3.1-8b/prefill.yaml engine_configs/qwen3-32b-fp8/decode.yaml"
    ),
}


def run(shot: Shot, directory: Path) -> pyte.Screen:
    """The screen when it shows `shot.until`, or at the end of the command."""
    for name in (".cache", "engine_configs"):
        (directory / name).symlink_to(ROOT / name)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-P", "-m", "trtllm_disagg", *shot.arguments.split()]
    environment = {**os.environ, "TERM": "xterm-256color", "TMPDIR": str(directory)}
    process = subprocess.Popen(
        command, cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    taken = False
    while (read := _read(ours)) is not None:
        if not taken:
            stream.feed(read)
            if shot.until and any(re.search(shot.until, line) for line in screen.display):
                taken = True
                process.send_signal(signal.SIGINT)
    os.close(ours)
    if process.wait() and shot.until is None and "doctor" not in shot.arguments:
        raise SystemExit(f"error: {shot.arguments} failed\n" + "\n".join(screen.display).strip())
    return screen


def _read(terminal: int) -> bytes | None:
    """None when the last process has closed the terminal."""
    try:
        return os.read(terminal, 65536) or None
    except OSError:
        return None


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


def picture(name: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        lines = text_of(run(SHOTS[name], Path(directory)))
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
        console.print(f"$ trtllm-disagg {SHOTS[name].arguments}", style="bold", highlight=False)
        for line in lines:
            # Without the temporary directory in which it ran.
            shown = line if directory not in line.plain else Text(line.plain.replace(f"{directory}/", ""))
            console.print(shown)
    svg = console.export_svg(title=f"trtllm-disagg {name}", unique_id=name)
    return _FONT_FACE.sub("", svg)


def trace() -> str:
    """The trace of a request through prefill_first, drawn by `trtllm-disagg trace`."""
    with tempfile.TemporaryDirectory() as directory:
        order, run_dir, file = "prefill_first", Path(directory) / "run", Path(directory) / "trace.svg"
        config = DeploymentConfig(
            strategy=order,
            model=str(ROOT / DEFAULT_DIRECTORY),
            served_model_name="demo",
            run_dir=run_dir,
            http_port=0,
            engine="embedded",
            engine_configs=engine_configs_in(ROOT / "engine_configs" / "demo", order),
        )
        with deployment_in_background(config) as deployment:
            # The first request also connects the two engines.
            for question in ("Hello", QUESTION):
                stream_chat(deployment.base_url, config.served_model_name, question, max_tokens=40)
        # All spans are written, since both workers have ended.
        chosen = ("trace", "--run-dir", run_dir, "--last", "1", "--html", file)
        subprocess.run([sys.executable, "-P", "-m", "trtllm_disagg", *chosen], check=True)
        return file.read_text(encoding="utf-8")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or (*SHOTS, "trace"):
        (FOLDER / f"{name}.svg").write_text(trace() if name == "trace" else picture(name), encoding="utf-8")
