"""A command to an `up` that is stopped, or has ended, ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtllm_disagg.admin.commands import Describe, Switch
from trtllm_disagg.errors import ConfigError, DisaggError, StageTimeoutError
from trtllm_disagg.tools.admin.client import UpOfRunDir, ask_up
from trtllm_disagg.tools.up.command_socket import COMMAND_SOCKET, listen_at


def test_command_to_an_up_that_does_not_answer_ends_with_the_reason(tmp_path: Path) -> None:
    with listen_at(tmp_path / COMMAND_SOCKET), pytest.raises(StageTimeoutError, match="may be stopped"):
        ask_up(tmp_path, Describe(), seconds=0.05)


def test_an_up_that_ends_while_a_command_changes_its_workers_is_no_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(DisaggError, match="workers were changed, but `up` knows nothing of it") as caught:
        UpOfRunDir(tmp_path, {}).change_new_workers(Switch("prefill_first"))
    assert not isinstance(caught.value, ConfigError)
