"""How every command ends: with a code of the one table, quietly on Ctrl-C and when its reader leaves; and its help."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from trtllm_disagg.common.cli import COMMANDS, actions_of, main
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.tools.completion import SHELLS, whole_parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_every_command_without_output(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: argparse.Namespace) -> ExitCode:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(COMMANDS[name].module), "run", interrupt)
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(COMMANDS[name].example)[1:])
    assert caught.value.code == ExitCode.INTERRUPTED
    assert capsys.readouterr() == ("", "")


DOCTOR = ("doctor", *(f"engine_configs/demo/{role}.yaml" for role in ("prefill", "decode")))


@pytest.mark.parametrize(
    "argv",
    [("--help",), ("plan", "--help"), ("completion", "bash"), DOCTOR, (*DOCTOR, "--json")],
    ids=" ".join,
)
def test_closed_stdout_reader_ends_a_command_without_output(argv: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as left:
        ended = subprocess.run(
            [sys.executable, "-m", "trtllm_disagg", *argv],
            stdout=left,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
    assert (ended.stderr, ended.returncode) == ("", ExitCode.READER_LEFT)


@pytest.mark.parametrize(
    ("closed", "argv", "told", "status"),
    [
        (">&-", "doctor none.yaml none.yaml", "error: prefill: 'none.yaml'", ExitCode.WRONG_SETTING),
        ("2>&-", "doctor none.yaml none.yaml", "", ExitCode.WRONG_SETTING),
        ("<&- >&- 2>&-", "completion bash", "", ExitCode.DONE),
    ],
)
def test_a_closed_stream_changes_no_exit_code(closed: str, argv: str, told: str, status: ExitCode) -> None:
    script = f'exec "$0" -m trtllm_disagg {argv} {closed}'
    ended = subprocess.run(
        ["sh", "-c", script, sys.executable], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (ended.stdout, ended.returncode) == ("", status)
    assert ended.stderr.startswith(told)
    assert "Traceback" not in ended.stderr


def test_broken_pipe_of_a_child_process_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def break_pipe(args: argparse.Namespace) -> ExitCode:
        raise BrokenPipeError("the engine process is gone")

    monkeypatch.setattr(import_module(COMMANDS["completion"].module), "run", break_pipe)
    with pytest.raises(SystemExit) as caught:
        main(["completion", "bash"])
    assert (caught.value.code, capfd.readouterr().err) == (1, "error: the engine process is gone\n")


# -- `--help`: at once, for every command and flag; and the same for a shell that completes them


#: Each takes longer to load than all that `--help` needs.
LIBRARIES = (
    *("dynamo", "huggingface_hub", "numpy", "prometheus_client", "pydantic", "rich", "tensorrt_llm"),
    *("tokenizers", "torch", "transformers", "uvloop", "zmq"),
)
LOADED = f"""
import sys
from trtllm_disagg.tools.completion import whole_parser
whole_parser().format_help()
print(*sorted(set({LIBRARIES}) & set(sys.modules)))
"""


def test_no_help_loads_a_library_that_only_the_work_needs() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("\n", "")


COMMAND_PARSERS = next(
    action for action in actions_of(whole_parser()) if isinstance(action, argparse._SubParsersAction)
)
PARSERS = list(COMMAND_PARSERS.choices.values())


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog.partition(" ")[2])
def test_every_command_and_every_flag_is_described(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    for action in actions_of(parser):
        told = re.sub(r"\(default: .*", "", action.help or "").strip()
        assert (action.help or "").count("(default:") <= 1
        assert told, f"{action.option_strings or action.dest}: only a default, or nothing"
    assert "(default: [" not in parser.format_help(), "a default is shown as it is given: no Python list"


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command_and_a_flag_of_each(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", shell])
    assert caught.value.code == ExitCode.DONE
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
    for flag in ("disaggregation-mode", "max-local-prefill-length", "perfetto", "once"):
        assert flag in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
