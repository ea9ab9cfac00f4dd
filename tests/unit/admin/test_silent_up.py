"""A command to an `up` that is stopped ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.admin.client import ask_up
from trtllm_disagg.commands import Describe
from trtllm_disagg.deployment.command_socket import COMMAND_SOCKET, listen_at
from trtllm_disagg.errors import StageTimeoutError


def test_command_to_an_up_that_does_not_answer_ends_with_the_reason(tmp_path: Path) -> None:
    with listen_at(tmp_path / COMMAND_SOCKET), pytest.raises(StageTimeoutError, match="may be stopped"):
        ask_up(tmp_path, Describe(), seconds=0.05)
