"""`trtllm-disagg top`: a running deployment, live until Ctrl-C. `--once` prints one frame and ends."""

from __future__ import annotations

import argparse
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode

if TYPE_CHECKING:
    from trtllm_disagg.tools.top.observers import Observer

_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--run-dir", type=Path, metavar="DIR", help="run directory of a running `up`")
    add("--url", help="instead: the URL of a frontend; on this machine its run directory is found")
    add("--once", action="store_true", help="print one frame and end")
    add("--json", action="store_true", help="with --once: as JSON")
    add(
        "--interval",
        type=float,
        default=_SECONDS,
        metavar="SECONDS",
        help="between two looks (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Returns 0 also for a dead deployment, which the frame shows. Raises ConfigError without a deployment."""
    if (args.run_dir is None) == (args.url is None):
        raise ConfigError("top needs one of --run-dir DIR and --url URL")
    if args.json and not args.once:
        raise ConfigError("--json is for one frame; add --once")
    if not args.once and not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise ConfigError("the live screen needs a terminal; --once prints one frame")
    if not args.interval > 0:
        raise ConfigError.bad_value("--interval", args.interval, "more than 0 seconds")
    # Imported here because `--help` does not need them.
    import asyncio

    from trtllm_disagg.processes.exits import ending_as_on_ctrl_c
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
    """Typed characters would stay on the live screen; they are dropped at its end."""
    before = termios.tcgetattr(sys.stdin)
    now = [*before]
    now[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


async def _live(observer: Observer, interval: float) -> None:
    """Until Ctrl-C. A look that takes longer than `interval` delays the next one, and never makes two overlap."""
    import asyncio

    from rich.live import Live

    from trtllm_disagg.console import Console
    from trtllm_disagg.tools.top.frame import live_frame
    from trtllm_disagg.tools.top.snapshot import History

    history, console = History(), Console()
    with Live("looking ...", console=console, screen=True, auto_refresh=False) as live:
        while True:
            history.add(await observer.look())
            live.update(live_frame(history, console.width, console.height), refresh=True)
            await asyncio.sleep(interval)
