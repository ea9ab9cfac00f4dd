"""A command to an `up` that is stopped ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.admin import client
from trtllm_disagg.commands import Describe
from trtllm_disagg.deployment.command_socket import COMMAND_SOCKET, listen_at
from trtllm_disagg.errors import StageTimeoutError


def test_command_to_an_up_that_does_not_answer_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.05)
    with listen_at(tmp_path / COMMAND_SOCKET), pytest.raises(StageTimeoutError, match="may be stopped"):
        client.ask_up(tmp_path, Describe())
