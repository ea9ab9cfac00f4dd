"""Shows how training goes: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trtllm_disagg.console import Console
from trtllm_disagg.demo_model.training import Report
from trtllm_disagg.processes.steadily import SECONDS


def say(text: str) -> None:
    Console(soft_wrap=True).print(f"demo-model: {text}", markup=False)


@contextmanager
def progress_report(clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    console = Console()
    if not console.is_terminal:
        yield line_report(clock)
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TimeRemainingColumn(),
    )
    with Progress(TextColumn("training"), *columns, console=console) as bar:
        task = bar.add_task("training", total=None, loss=float("nan"))
        yield lambda step, steps, loss: bar.update(task, completed=step, total=steps, loss=loss)


def line_report(clock: Callable[[], float]) -> Report:
    first = last = 0.0

    def report(step: int, steps: int, loss: float) -> None:
        nonlocal first, last
        now = clock()
        if step == 1:
            # The first step warms up; its own time says nothing about the others.
            first = last = now
            say(f"step {step}/{steps}, loss {loss:.2f}")
        elif now - last >= SECONDS or step == steps:
            last = now
            left = (now - first) / (step - 1) * (steps - step)
            say(f"step {step}/{steps}, loss {loss:.2f}, {left:.0f} s left")

    return report
