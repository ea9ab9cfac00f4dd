"""What people get to read when something went wrong."""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_disagg.deployment.process import ManagedProcess

LOG_LINES = 15


def death_report(process: ManagedProcess, when: str) -> str:
    lines = process.last_lines(LOG_LINES) or ["(the log is empty)"]
    return "\n".join(
        [
            f"{process.name} (pid {process.pid}) died {when}: {process.describe_end()}, "
            f"{process.elapsed:.1f} s after its start",
            f"last lines of {process.log}:",
            *(f"  {line}" for line in lines),
        ]
    )


def late_report(processes: Iterable[ManagedProcess], timeout: float) -> str:
    late = [process for process in processes if process.state != "ready"]
    lines = [f"not ready after {timeout:g} s: {', '.join(process.name for process in late)}"]
    for process in late:
        last = process.last_lines(1) or ["(the log is empty)"]
        lines.append(f"  {process.name} (pid {process.pid}, {process.log}): {last[0]}")
    return "\n".join(lines)


def leftovers_report(processes: Iterable[ManagedProcess], waited: float) -> str:
    names = ", ".join(process.name for process in processes)
    return f"still running {waited:.1f} s after the order to stop, killed: {names}"
