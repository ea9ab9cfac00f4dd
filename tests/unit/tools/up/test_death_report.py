"""What is told of a process that died: its cause first, then the end of its log."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trtllm_disagg.tools.up.managed_process import ManagedProcess
from trtllm_disagg.tools.up.plan import ProcessRole, ProcessSpec
from trtllm_disagg.tools.up.status import cause_in, continued, death_report, late_report, what_it_does

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


async def test_the_log_of_an_earlier_deployment_in_the_directory_does_not_hide_the_cause(
    tmp_path: Path,
) -> None:
    (tmp_path / "log").write_text("an earlier line\n" * 1000)
    process = await ended(tmp_path, f"print({OURS!r}); raise SystemExit(2)")

    sentence, _, *tail = death_report(process, "while serving").split("\n")

    assert "model: toy holds no *.safetensors file" in sentence
    assert tail == [f"  {OURS}"]


UNSERVED = (
    "2026-11-27T11:39:12.205527Z  WARN dynamo_llm::discovery::controller: Model materialization failed; scheduling "
    'retry group=["toy","[\\"dynamo\\"]"] attempt=1 retry_ms=1000 '
    'error="prompt_formatter_from_mdc: chat_template is required"'
)


@pytest.mark.parametrize("role", ["frontend", "decode"])
def test_late_frontend_is_reported_with_the_reason_that_it_logged(tmp_path: Path, role: ProcessRole) -> None:
    (tmp_path / "log").write_text(f"{NOISE}\n{UNSERVED}\n{NOISE}\n")
    process = ManagedProcess(ProcessSpec(role, role, ("true",)), tmp_path / "log")
    process.state = "starting"

    first, line = late_report([process], 25).split("\n")

    reason = "cannot serve the model: prompt_formatter_from_mdc: chat_template is required"
    assert (f"frontend ({reason})" in first) == (role == "frontend")
    assert line.endswith(NOISE)
    assert what_it_does(process) == (reason if role == "frontend" else "starting")


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
