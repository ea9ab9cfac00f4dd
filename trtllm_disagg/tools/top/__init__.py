"""`trtllm-disagg top`: shows a running deployment, live until Ctrl-C or with `--once` as one frame."""

from __future__ import annotations

import argparse
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.flag_types import more_than_zero

if TYPE_CHECKING:
    from trtllm_disagg.tools.top.observers import Observer

_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run-dir", type=Path, metavar="DIR", help="run directory of `up`")
    add("--url", help="frontend; on this machine `top` finds its run directory")
    add("--once", action="store_true", help="print one frame and exit")
    add("--json", action="store_true", help="with --once: print JSON")
    add(
        "--interval",
        type=more_than_zero,
        default=_SECONDS,
        metavar="SECONDS",
        help="time between updates (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 even for a dead deployment, as the frame shows it. Raises ConfigError without a deployment."""
    if (args.run_dir is None) == (args.url is None):
        raise ConfigError("top needs one of --run-dir DIR and --url URL")
    if args.json and not args.once:
        raise ConfigError("--json prints one frame; add --once")
    if not args.once and not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise ConfigError("the live screen needs a terminal; --once prints one frame")
    import asyncio

    from trtllm_disagg.common.exits import ending_as_on_ctrl_c
    from trtllm_disagg.tools.top.frame import print_frame, to_json
    from trtllm_disagg.tools.top.observers import observer_of

    observer = observer_of(args.run_dir, args.url)
    if not args.once:
        with ending_as_on_ctrl_c(), _without_echo():
            asyncio.run(_live(observer, args.interval))
    seen = asyncio.run(observer.look())
    if args.json:
        print(to_json(seen))
    else:
        print_frame(seen)
    return ExitCode.DONE


@contextmanager
def _without_echo() -> Iterator[None]:
    """Hides typed characters, which would stay on the live screen, and drops them at its end."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


async def _live(observer: Observer, interval: float) -> None:
    """Runs until Ctrl-C. A look slower than `interval` delays the next one; looks never overlap."""
    import asyncio

    from rich.live import Live

    from trtllm_disagg.common.console import Console
    from trtllm_disagg.tools.top.frame import live_frame
    from trtllm_disagg.tools.top.snapshot import History

    history, console = History(), Console()
    with Live("looking ...", console=console, screen=True, auto_refresh=False) as live:
        while True:
            history.add(await observer.look())
            live.update(live_frame(history, console.width, console.height), refresh=True)
            await asyncio.sleep(interval)
