"""`trtllm-disagg doctor` of this machine, and the report, in which no secret may be."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.support.packages import install
from tests.unit.tools.doctor.conftest import Doctor, Files
from tests.unit.tools.doctor.test_rules import DECODE, PREFILL
from trtllm_disagg.tools.doctor.machine import findings, hidden

pytestmark = pytest.mark.process

ROWS = ["TensorRT-LLM", "MPI", "visible GPUs", "limits"]
TOKEN = "hf_QwErTyUiOpAsDfGh"
SECRETS = {
    "HF_TOKEN": TOKEN,
    "DYN_ROUTER_KEY": "zebra7",
    "TRTLLM_PASSWORD": "rosebud",
    "HOME": "/home/alice",
    "USER": "alice",
}
PLACES = {"UCX_TLS": "sm,rc", "DYN_FILE_KV": "/home/alice/kv", "DYN_URL": "http://bob:hunter2@etcd:2379"}
SECRET_ARGS = {
    "model": "/home/bob/models/llama",
    "hf_token": "plain-words",
    "speculative_config": {"api_key": "more-words", "speculative_model": f"org/{TOKEN}"},
    "tokenizer": "/lustre/alice/tokenizer",
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has the launcher of mpich, if that is installed, and an nvidia-smi that shows two GPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0, GPU-a1\\n1, GPU-b2\\n'\n")
    smi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_without_files_doctor_looks_at_this_machine(doctor: Doctor) -> None:
    ended = doctor("--json")
    rows = {row["rule"]: row for row in json.loads(ended.out)["rows"]}
    assert (ended.status, list(rows)) == (0, ROWS)
    assert rows["visible GPUs"]["value"] == "0,1"
    assert f"as uid {os.geteuid()}" in rows["MPI"]["value"] or "mpi4py is not" in rows["MPI"]["instead"]


def test_an_exported_gpu_that_is_missing_is_an_error(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5")
    ended = doctor()
    assert ended.status == 1
    assert "error visible GPUs: CUDA_VISIBLE_DEVICES: '0,5' is not allowed; expected GPUs" in ended.out


def test_with_tensorrt_llm_two_mpis_are_an_error_beside_the_rows_of_files(
    pair: Files, doctor: Doctor, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(machine, "mpich", "tensorrt_llm")
    monkeypatch.syspath_prepend(machine)
    ended = doctor(*pair)
    assert ended.status == 1
    assert "error MPI: mpich is installed beside TensorRT-LLM" in ended.out
    assert {finding.rule for finding in findings(os.environ) if finding.verdict == "error"} == {"MPI"}


def test_the_report_has_versions_machine_and_arguments_and_no_secret(
    pair: Files, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SECRETS | PLACES).items():
        monkeypatch.setenv(name, value)
    for file, content in zip(pair, (PREFILL, DECODE), strict=True):
        file.write_text(yaml.safe_dump(content | SECRET_ARGS))
    told = doctor(*pair, "--report").out
    for needed in (*ROWS, f"Python {platform.python_version()}", "ai-dynamo ", "GPU-a1", "UCX_TLS=sm,rc"):
        assert needed in told
    assert told.count("  max_tokens_in_buffer: 16384\n") == 2
    assert "model: ~/models/llama" in told
    secret = (
        TOKEN,
        "zebra7",
        "rosebud",
        "alice",
        "bob",
        "hunter2",
        "plain-words",
        "more-words",
        "DYN_ROUTER_KEY",
    )
    assert [word for word in (*secret, platform.node()) if word in told] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("key nvapi-abcdefgh12 here", "key *** here"),
        ("aB3dEfGhIjKlMnOpQrStUvWxYz0123456789", "***"),
        ("tokens_per_block: 32, max_num_tokens: 8192", "tokens_per_block: 32, max_num_tokens: 8192"),
        (
            "snapshots/0123456789abcdef0123456789abcdef01234567",
            "snapshots/0123456789abcdef0123456789abcdef01234567",
        ),
    ],
    ids=["a known kind", "random characters", "arguments", "a commit"],
)
def test_what_looks_like_a_secret_is_hidden_and_other_words_stay(text: str, shown: str) -> None:
    assert hidden(text, {}) == shown
