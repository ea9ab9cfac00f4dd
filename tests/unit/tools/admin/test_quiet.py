"""Only a command's own lines reach its user."""

from __future__ import annotations

import os
import sys

import pytest

from trtllm_disagg.tools.admin.client import quiet_runtime


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
