"""How far KV travels, and the key that it takes to get it on another host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import write_key
from trtllm_disagg.engines.embedded.kv_transfer import ucx
from trtllm_disagg.engines.embedded.kv_transfer.access import (
    KEY_FILE_VARIABLE,
    Network,
    OneHost,
    choose_scope,
)
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.engines.embedded.params.supported_args import refuse_unsupported
from trtllm_disagg.errors import ConfigError


def llm_args(**args: Any) -> LlmArgs:
    return LlmArgs(model="m", **args)


@pytest.fixture(autouse=True)
def without_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_loopback_address_means_one_host(host: str) -> None:
    assert choose_scope(host, None) == OneHost()


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1", "prefill-0.example"])
def test_another_address_without_a_key_is_refused_before_anything_is_built(host: str) -> None:
    args = llm_args(embedded={"transfer_host": host}, cache_transceiver_config={"backend": "DEFAULT"})
    with pytest.raises(ConfigError, match=r"embedded\.transfer_host.*embedded\.transfer_key_file"):
        refuse_unsupported(args)


def test_without_kv_transfer_no_key_is_asked_for() -> None:
    refuse_unsupported(llm_args(embedded={"transfer_host": "10.0.0.1"}))


def test_key_file_setting_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(write_key(tmp_path, b"variable" * 4)))
    assert choose_scope("10.0.0.1", None) == Network("10.0.0.1", b"variable" * 4)
    assert choose_scope("10.0.0.1", write_key(tmp_path)) == Network("10.0.0.1", b"k" * 32)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    key = write_key(tmp_path)
    key.chmod(mode)
    with pytest.raises(ConfigError, match=rf"embedded\.transfer_key_file.*its mode is {mode:04o}"):
        choose_scope("10.0.0.1", key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another group")
def test_a_secret_that_root_gets_by_the_group_of_its_pod_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, group = write_key(tmp_path), 2000
    os.chown(key, 0, group)
    key.chmod(0o440)
    with pytest.raises(ConfigError, match="its mode is 0440"):
        choose_scope("10.0.0.1", key)
    monkeypatch.setattr(os, "getgroups", lambda: [0, group])
    assert choose_scope("10.0.0.1", key) == Network("10.0.0.1", b"k" * 32)
    key.chmod(0o444)
    with pytest.raises(ConfigError, match="its mode is 0444"):
        choose_scope("10.0.0.1", key)


def test_a_short_or_missing_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 32 bytes.*it has 31"):
        choose_scope("10.0.0.1", write_key(tmp_path, b"k" * 31 + b"\n"))
    with pytest.raises(ConfigError, match="No such file"):
        choose_scope("10.0.0.1", tmp_path / "missing")


def test_repr_of_a_network_scope_hides_the_key() -> None:
    assert "kkk" not in repr(Network("10.0.0.1", b"k" * 32))


# -- what UCX may use


def test_ucx_tls_of_the_environment_is_ignored_on_one_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for chosen in ("tcp", "cma,tcp", "all", "posix,cma,self,rc"):
        caplog.clear()
        assert ucx.ucx_settings(OneHost(), "cpu", {"UCX_TLS": chosen})["UCX_TLS"] == "posix,cma,self"
        assert f"UCX_TLS={chosen} is not used" in caplog.text
    caplog.clear()
    assert ucx.ucx_settings(OneHost(), "cpu", {"UCX_TLS": "self,cma"})["UCX_TLS"] == "posix,cma,self"
    assert "tcp" not in ucx.ucx_settings(OneHost(), "cuda", {})["UCX_TLS"]
    assert not caplog.records


def test_a_gpu_s_memory_is_read_by_its_driver_unless_the_user_says_otherwise() -> None:
    """UCX's own default reads it through the CPU where there is no NVLink."""
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    assert ucx.ucx_settings(OneHost(), "cuda", {})[name] == "on"
    assert ucx.ucx_settings(OneHost(), "cuda", {name: "off"})[name] == "off"


def test_between_hosts_ucx_listens_on_the_chosen_address_only() -> None:
    network = Network("127.0.0.1", b"k" * 32)
    assert (
        ucx.ucx_settings(network, "cpu", {}).items()
        >= {"UCX_TLS": "cma,tcp", "UCX_NET_DEVICES": "lo"}.items()
    )
    assert "UCX_NET_DEVICES" not in ucx.ucx_settings(network, "cpu", {"UCX_TLS": "rc"})
    assert ucx.ucx_error_mode(network) == "peer"


def test_the_environment_is_as_it_was_after_an_agent_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_CMA_SEG_SIZE", raising=False)
    with ucx.ucx_environment({"UCX_TLS": "self", "UCX_CMA_SEG_SIZE": "1"}):
        assert (os.environ["UCX_TLS"], os.environ["UCX_CMA_SEG_SIZE"]) == ("self", "1")
    assert os.environ["UCX_TLS"] == "tcp"
    assert "UCX_CMA_SEG_SIZE" not in os.environ
