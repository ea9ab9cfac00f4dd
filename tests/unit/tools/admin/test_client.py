"""A command to an `up` that is stopped, or has ended, ends; and only a command's own lines reach its user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trtllm_disagg.admin.commands import Describe, Set
from trtllm_disagg.errors import ConfigError, DisaggError, StageTimeoutError
from trtllm_disagg.tools.admin.client import Up, quiet_runtime
from trtllm_disagg.tools.up.command_socket import COMMAND_SOCKET, listen_at, send_to_up


def test_command_to_an_up_that_does_not_answer_ends_with_the_reason(tmp_path: Path) -> None:
    with listen_at(tmp_path / COMMAND_SOCKET), pytest.raises(StageTimeoutError, match="may be stopped"):
        send_to_up(tmp_path, Describe(), seconds=0.05)


def test_an_up_that_ends_while_a_command_changes_its_workers_is_no_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(DisaggError, match="workers were changed, but `up` knows nothing of it") as caught:
        Up(tmp_path).change_new_workers(Set({}))
    assert not isinstance(caught.value, ConfigError)


def write_both() -> None:
    os.write(2, b"the runtime\n")
    print("the command", file=sys.stderr)


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, "the command\n"),
        ({"DYN_LOG": ""}, "the command\n"),
        ({"DYN_LOG": "info"}, "the runtime\nthe command\n"),
    ],
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
