"""`switch` and `set` with --json: one JSON value on stdout, whatever else is said goes to stderr."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from tests.unit.tools.admin.test_set_command import FakeDeployment
from trtllm_disagg.cli import run
from trtllm_disagg.processes.exits import ExitCode
from trtllm_disagg.tools.admin import client


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> FakeDeployment:
    fake = FakeDeployment()

    def change_deployment(args: argparse.Namespace, change: client.Change) -> ExitCode:
        async def carry_out() -> ExitCode:
            return await change(fake, fake.up)

        return asyncio.run(carry_out())

    monkeypatch.setattr(client, "change_deployment", change_deployment)
    return fake


def test_set_lists_each_worker_with_what_changed_or_why_not(
    deployment: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.gone = {10}
    assert run(["set", "--max-local-prefill-length", "500", "--json"]) is ExitCode.FAILED
    said = capsys.readouterr()
    assert json.loads(said.out) == [
        {"worker": "prefill a", "changed": [], "error": "it is gone"},
        {"worker": "decode b", "changed": ["max_local_prefill_length: 1000 -> 500"], "error": None},
    ]
    assert said.err == "error: prefill a: it is gone\n"


def test_switch_json_has_model_strategy_and_first_stage(
    deployment: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.said[11] |= {"registered": True}
    words = ["switch", "--to", "prefill_first", "--settle", "0", "--json"]
    assert run(words) is ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert told.pop("seconds") >= 0
    assert told == {"model": "m", "strategy": "prefill_first", "first": ["prefill a"], "requests_left": 0}
    assert run(words) is ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["seconds"] is None
