"""What is told of a process that died: its cause first, then the end of its log."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trtllm_disagg.deployment.failure_reports import cause_in, continued, death_report
from trtllm_disagg.deployment.managed_process import ManagedProcess
from trtllm_disagg.deployment.plan import ProcessSpec

OURS = "error: model: toy holds no *.safetensors file"
NOISE = "2026-11-22T00:27:52.98Z  INFO dynamo_runtime::runtime: Runtime shutdown initiated"
DYNAMO = "2026-11-22T00:33:33.25Z ERROR main.parse_args: Unknown arguments specified: ['--nonsense']"
PYTHON = "ValueError: no such thing"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([NOISE, OURS, NOISE], "model: toy holds no *.safetensors file"),
        ([OURS, PYTHON, DYNAMO, NOISE], "model: toy holds no *.safetensors file"),
        (["Traceback (most recent call last):", "  raise ValueError", PYTHON, NOISE], PYTHON),
        (["pkg.errors.OddError: x"], "pkg.errors.OddError: x"),
        ([NOISE, DYNAMO, NOISE], "Unknown arguments specified: ['--nonsense']"),
        ([NOISE, "an error: in a sentence"], None),
        ([DYNAMO, *[NOISE] * 5], None),
        ([], None),
    ],
)
def test_death_cause_is_found_in_any_line(lines: Sequence[str], cause: str | None) -> None:
    assert cause_in(lines) == cause


async def ended(tmp_path: Path, script: str) -> ManagedProcess:
    process = ManagedProcess(
        ProcessSpec("decode-0", "decode", (sys.executable, "-S", "-c", script)), tmp_path / "log"
    )
    await process.start({})
    async with asyncio.timeout(30):
        await process.wait()
    return process


async def test_the_first_line_is_the_sentence_and_the_log_follows(tmp_path: Path) -> None:
    process = await ended(tmp_path, f"print({OURS!r}); print('x' * 999); raise SystemExit(2)")

    sentence, where, *tail = death_report(process, "while serving").split("\n")

    assert sentence.startswith(
        f"decode-0 died while serving: model: toy holds no *.safetensors file (exit code 2), pid {process.pid}, "
    )
    assert where == f"last lines of {process.log}:"
    assert tail == [f"  {OURS}", f"  {'x' * 237}..."]
    assert continued(f"{sentence}\n{where}", "it starts again in 1 s").split("\n") == [
        f"{sentence}; it starts again in 1 s",
        where,
    ]


async def test_death_report_of_a_killed_process_names_the_signal(tmp_path: Path) -> None:
    process = await ended(tmp_path, f"import os; print({DYNAMO!r}, flush=True); os.kill(os.getpid(), 9)")

    assert death_report(process, "while serving").startswith(
        f"decode-0 died while serving: killed by SIGKILL, pid {process.pid}, "
    )


async def test_death_report_explains_missing_inotify_instances(tmp_path: Path) -> None:
    process = await ended(tmp_path, "print('watch: Too many open files (os error 24)'); raise SystemExit(1)")

    report = death_report(process, "before it was ready")

    assert "sudo sysctl fs.inotify.max_user_instances=1024" in report.split("\n")[0]


async def test_death_report_shows_only_lines_of_the_last_start(tmp_path: Path) -> None:
    process = await ended(tmp_path, f"print({OURS!r}); raise SystemExit(2)")
    process.spec = ProcessSpec("decode-0", "decode", (sys.executable, "-S", "-c", "print('second')"))
    await process.start({})
    async with asyncio.timeout(30):
        await process.wait()

    assert process.last_lines(10) == ["second"]
    first, marker, second = process.log.read_text().splitlines()
    assert (first, second) == (OURS, "second")
    assert marker.startswith("--- started again at ")
    assert marker.endswith(", after: exit code 2 ---")
