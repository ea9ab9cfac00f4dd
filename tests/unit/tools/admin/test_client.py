"""A command to an `up` that is stopped ends; and only a command's own lines reach its user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trtllm_disagg.errors import StageTimeoutError
from trtllm_disagg.tools.admin.fleet import quiet_runtime
from trtllm_disagg.tools.up.command_socket import COMMAND_SOCKET, listen_at, send_to_up
from trtllm_disagg.tools.up.commands import Describe


def test_command_to_an_up_that_does_not_answer_ends_with_the_reason(tmp_path: Path) -> None:
    with listen_at(tmp_path / COMMAND_SOCKET), pytest.raises(StageTimeoutError, match="it may be suspended"):
        send_to_up(tmp_path, Describe(), deadline=0.05)


def write_both() -> None:
    os.write(2, b"the runtime\n")
    print("the command", file=sys.stderr)


@pytest.mark.parametrize(
    ("environ", "shown"), [({}, "the command\n"), ({"DYN_LOG": "info"}, "the runtime\nthe command\n")]
)
def test_the_log_of_the_runtime_is_shown_when_it_was_asked_for(
    capfd: pytest.CaptureFixture[str], environ: dict[str, str], shown: str
) -> None:
    before = dict(environ)
    with quiet_runtime(environ):
        write_both()
    assert capfd.readouterr().err == shown
    assert environ == before


def test_stderr_is_restored_after_a_quiet_block_with_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), quiet_runtime({}):
        raise ValueError
    write_both()
    assert capfd.readouterr().err == "the runtime\nthe command\n"
