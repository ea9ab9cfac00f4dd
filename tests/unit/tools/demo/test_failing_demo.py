"""What `trtllm-disagg demo` says and keeps when an answer fails or differs: with a stand-in for the deployments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.pages import Pages
from trtllm_disagg.common import cli
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.strategies import orders
from trtllm_disagg.tools.demo import both_orders
from trtllm_disagg.tools.demo.both_orders import ChatAnswer, show_both_orders, stream_chat
from trtllm_disagg.tools.up.plan import DeploymentConfig

ARGUMENTS = argparse.Namespace(model="m/m", image=None, question="?", max_tokens=2, engine_configs=Path("/x"))


@pytest.fixture(autouse=True)
def no_deployment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @contextmanager
    def deployment(config: DeploymentConfig, status: object) -> Iterator[SimpleNamespace]:
        config.run_dir.mkdir()
        (config.run_dir / "decode-0.log").touch()
        yield SimpleNamespace(base_url="http://127.0.0.1:1")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(both_orders, "deployment_in_background", deployment)
    monkeypatch.setattr(both_orders, "servable_model", Path)
    monkeypatch.setattr(both_orders, "trace_of", lambda deployment, answer: None)


def kept(said: str) -> list[str]:
    (directory,) = re.findall(r"[Tt]he logs are kept in (\S+)", said)
    return sorted(str(log.relative_to(directory)) for log in Path(directory).rglob("*.log"))


def test_answer_that_fails_leaves_the_logs_and_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object, **options: object) -> ChatAnswer:
        raise ConnectionError("the request failed")

    monkeypatch.setattr(both_orders, "stream_chat", fails)
    with pytest.raises(ConnectionError):
        show_both_orders(ARGUMENTS)
    assert kept(capsys.readouterr().err) == ["prefill_first/decode-0.log"]


@pytest.mark.parametrize(("texts", "code"), [("same", ExitCode.DONE), ("differ", ExitCode.FAILED)])
def test_logs_of_both_orders_are_kept_and_named_only_when_their_answers_differ(
    texts: str,
    code: ExitCode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    told: list[str] = []

    def answers(*args: object, **options: object) -> ChatAnswer:
        told.append("again")
        return ChatAnswer(str(len(told)) if texts == "differ" else "same", 0.0, 0.0, 0.0)

    monkeypatch.setattr(both_orders, "stream_chat", answers)
    assert show_both_orders(ARGUMENTS) is code
    said = capsys.readouterr().out
    if code is ExitCode.DONE:
        assert list(tmp_path.iterdir()) == []
    else:
        assert kept(said) == sorted(f"{order.name}/decode-0.log" for order in orders())


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, '{"message": "no worker"}', '503: {"message": "no worker"}'),
        (200, 'data: {"message": "the worker is gone"}\n\n', "the worker is gone"),
    ],
    ids=["refused", "midway"],
)
def test_failed_answer_ends_with_the_frontends_reason(
    status: int,
    body: str,
    reason: str,
    pages: Pages,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages.pages["/v1/chat/completions"] = (status, body)
    monkeypatch.setattr(cli, "run", lambda argv: stream_chat(pages.url, "m", "?", max_tokens=1))
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo"])
    assert ended.value.code == ExitCode.FAILED
    assert capsys.readouterr().err == f"error: the request failed: {reason}\n"
