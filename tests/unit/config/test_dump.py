"""--dump-config-to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtllm_disagg.config.engine_args import dump_config
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError


def test_config_dump_has_engine_and_worker_arguments_and_no_password(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    config = WorkerConfig(
        model="m",
        role=Role.PREFILL,
        nats_server="nats://me:secret@h:1",
        dump_config_to=str(file),
        explicit=frozenset({"role", "model"}),
    )
    dump_config(config, {"max_batch_size": 8})
    content = json.loads(file.read_text())
    assert content["engine_args"] == {"max_batch_size": 8}
    assert content["dynamo_args"]["role"] == "prefill"
    assert content["dynamo_args"]["explicit"] == ["model", "role"]
    assert content["dynamo_args"]["nats_server"] == "nats://***@h:1"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    config = WorkerConfig(model="m", dump_config_to=str(tmp_path / "no" / "folder"))
    with pytest.raises(ConfigError, match=r"--dump-config-to: .*a file that can be written"):
        dump_config(config, {})


def test_config_is_not_dumped_without_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dump_config(WorkerConfig(model="m"), {})
    assert list(tmp_path.iterdir()) == []
