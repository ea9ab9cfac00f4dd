"""Reports of failed processes: a sentence with the cause, then the end of the log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from trtllm_disagg.errors import ERROR_PREFIX
from trtllm_disagg.processes.machine import INOTIFY_KEY
from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import NO_WORKERS

LOG_LINES = 15
#: Lines at the end of the log that are searched for the cause.
SEARCHED_LINES = 400
LAST_LINES = 5
#: A longer cause is cut off; the log has it in full.
MOST_CHARS = 600
#: A longer line of the log is cut off.
LINE_CHARS = 240
#: Dynamo's error when it may not watch another directory.
NO_INOTIFY = "Too many open files (os error 24)"
#: An error in Dynamo's log; the group is its message.
LOGGED_ERROR = re.compile(r"^\S+Z\s+ERROR \S+: (.+)$")
#: Dynamo's frontend has found workers of a model, and cannot serve it; the group is the reason.
UNSERVED = re.compile(r'Model materialization failed.* error="(.+)"$')
#: The last line of a traceback.
EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*$")


def cause_in(lines: Sequence[str]) -> str | None:
    """The last error that a process printed before it ended: this package's, else Python's or Dynamo's."""
    for line in reversed(lines):
        if line.startswith(ERROR_PREFIX):
            return _short(line.removeprefix(ERROR_PREFIX), MOST_CHARS)
    # Dynamo also logs harmless errors; the one that ended the process is the last one.
    for line in reversed(lines[-LAST_LINES:]):
        if EXCEPTION.match(line):
            return _short(line, MOST_CHARS)
        if logged := LOGGED_ERROR.match(line):
            return _short(logged[1], MOST_CHARS)
    return None


def unserved_because(frontend: ManagedProcess) -> str | None:
    """Why a frontend that has found workers does not serve their model: as a rule its tokenizer's files. Dynamo
    tries again, which helps where a file was not there yet.
    """
    found = (UNSERVED.search(line) for line in reversed(frontend.last_lines(SEARCHED_LINES)))
    return next((_short(each[1], LINE_CHARS) for each in found if each), None)


def death_report(process: ManagedProcess, when: str) -> str:
    """Which process died and why, in the first line; then the end of its log."""
    # A process that was killed could not print the cause.
    cause = None if process.was_killed else cause_in(process.last_lines(SEARCHED_LINES))
    end = process.describe_end()
    what = end if cause is None else f"{cause} ({end})"
    if any(NO_INOTIFY in line for line in process.last_lines(SEARCHED_LINES)):
        what += f"; `{NO_INOTIFY}` is said of inotify instances, too: sudo sysctl {INOTIFY_KEY}=1024"
    lines = process.last_lines(LOG_LINES) or ["(the log is empty)"]
    return "\n".join(
        [
            f"{process.name} died {when}: {what}, pid {process.pid}, {process.elapsed:.1f} s after its start",
            f"last lines of {process.log}:",
            *(f"  {_short(line, LINE_CHARS)}" for line in lines),
        ]
    )


def continued(report: str, then: str) -> str:
    """A report with what happens next added to its first line."""
    first, *rest = report.split("\n")
    return "\n".join([f"{first}; {then}", *rest])


def left_report(process: ManagedProcess, *, is_last: bool) -> str:
    """Of a worker that something else than `up` has told to stop. `is_last`: none of its role is left."""
    left = f"{process.name} was told to stop, though not by this `up`, and has left"
    if not is_last or process.role in NO_WORKERS:
        return left
    return f"{left}; it was the last {process.role} worker: {_scale_command(process)} starts one"


def given_up_report(process: ManagedProcess, report: str, failed_starts: int) -> str:
    then = f"given up after {failed_starts} starts that failed"
    if process.role not in NO_WORKERS:
        then += f"; mend the cause, then {_scale_command(process)}"
    return continued(report, then)


def _scale_command(process: ManagedProcess) -> str:
    return f"`trtllm-disagg scale --run-dir {process.log.parent} --{process.role} N`"


def late_report(processes: Iterable[ManagedProcess], timeout: float) -> str:
    late = [process for process in processes if process.state != "ready"]
    names = ", ".join(
        f"{process.name} ({process.activity})" if process.activity.doing else process.name for process in late
    )
    lines = [f"not ready after {timeout:g} s: {names}; --startup-timeout allows for more"]
    for process in late:
        reason = unserved_because(process) if process.role == "frontend" else None
        last = process.last_lines(1) or ["(the log is empty)"]
        says = last[0] if reason is None else f"it cannot serve the model: {reason}"
        lines.append(f"  {process.name} (pid {process.pid}, {process.log}): {says}")
    return "\n".join(lines)


def leftovers_report(processes: Iterable[ManagedProcess], waited: float) -> str:
    names = ", ".join(process.name for process in processes)
    return f"still running {waited:.1f} s after the order to stop, killed: {names}"


def lost_discovery_report(discovery: Path) -> str:
    return (
        f"{discovery} was removed or moved: frontend and workers lose each other, and requests fail; "
        "stop this `up`, and start it again"
    )


def survivors_report(pids: Iterable[int]) -> str:
    listed = ", ".join(map(str, pids))
    return f"warning: SIGKILL has not ended these processes, which may wait for a GPU or a disk: pid {listed}"


def _short(text: str, most: int) -> str:
    text = text.strip()
    return text if len(text) <= most else text[: most - 3] + "..."
