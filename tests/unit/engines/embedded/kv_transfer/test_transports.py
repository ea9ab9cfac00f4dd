"""Which transport is chosen, by one table; and what NIXL needs of the machine, of its package and of UCX."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.conftest import Checkpoints
from tests.support.cores import Core
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.kv_transfer.transports import (
    TRANSPORTS,
    TransportSpec,
    backends,
    create_transport,
    nixl_api,
    require_package_for_gpus,
    ucx_environment,
    ucx_settings,
)
from trtllm_disagg.errors import ConfigError

# -- the table

TOY = TransportSpec("tests.support.fake_transport:FakeTransport")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "TOY", TOY)


@pytest.fixture
def pair(toy: None, checkpoints: Checkpoints) -> Iterator[tuple[Core, Core]]:
    pair = [Core(checkpoints(), cache_transceiver_config={"backend": "TOY"}) for _ in range(2)]
    yield pair[0], pair[1]
    for core in pair:
        core.close()


def test_a_line_in_the_table_is_enough_for_a_handoff(
    pair: tuple[Core, Core], checkpoints: Checkpoints
) -> None:
    prefill, decode = pair
    tokens = prompt(70)
    answer = decode.run(decode.add_decode(tokens, prefill.prefill(tokens)))
    agg = Core(checkpoints())
    assert answer.tokens == agg.generate(tokens)
    assert prefill.connector.transport == "FAKE"
    for core in (prefill, decode, agg):
        core.assert_idle()
    agg.close()


@pytest.mark.parametrize("backend", ["TOY", "shared_memory"])
def test_a_name_that_is_not_in_the_table_is_refused(checkpoints: Checkpoints, backend: str) -> None:
    with pytest.raises(ValueError, match=f"{backends()[-1]!r}.*'{backend}'"):
        Core(checkpoints(), cache_transceiver_config={"backend": backend})


def test_a_transport_with_a_library_that_is_not_here_is_refused_without_advice_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = TransportSpec("no_such_library.transport:Transport")
    monkeypatch.setitem(TRANSPORTS, "ABSENT", absent)
    with pytest.raises(ConfigError, match="a machine with ABSENT installed") as refused:
        create_transport("ABSENT")
    assert "nixl" not in str(refused.value)


# -- what NIXL needs of the machine

# As in a container without SYS_PTRACE: no process may read this one, and its children cannot be privileged.
_LOCKED_DOWN = """
import ctypes, logging, os
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport
logging.basicConfig(level="WARNING", format="%(message)s")
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, PR_CAPBSET_DROP, CAP_SYS_PTRACE = 4, 24, 19
if os.geteuid() == 0:
    assert libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) == 0
assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
try:
    create_transport("NIXL", needs_cma=True)
except ConfigError as error:
    print(error)
print(create_transport("DEFAULT", needs_cma=True).name, create_transport("NIXL").name)
"""


def test_without_process_vm_readv_nixl_is_refused_and_default_falls_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOCKED_DOWN], capture_output=True, text=True, check=True, timeout=60
    )
    refused, chosen = done.stdout.splitlines()
    assert "cache_transceiver_config.backend: 'NIXL' is not allowed" in refused
    for advice in ("Operation not permitted", "ptrace_scope=0", "SYS_PTRACE", "SHARED_MEMORY"):
        assert advice in refused
    assert chosen == "SHARED_MEMORY NIXL", "a kernel that is not needed is not asked"
    assert "KV moves through shared memory" in done.stderr


# -- NIXL's package


@pytest.fixture
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the parameter, and torch's CUDA. A name that is None cannot be imported."""
    packages, cuda = request.param
    for name in ("nixl_cu12", "nixl_cu13"):
        module = ModuleType(f"{name}._api") if name in packages else None
        monkeypatch.setitem(sys.modules, f"{name}._api", module)
    monkeypatch.setattr(torch.version, "cuda", cuda)


@pytest.mark.parametrize("installed", [((), "13.0")], indirect=True, ids=["none"])
def test_without_a_package_default_falls_back_to_shared_memory_and_nixl_by_name_is_refused(
    installed: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        transport = create_transport("DEFAULT")
    assert transport.name == "SHARED_MEMORY"
    assert "KV moves through shared memory" in caplog.text
    transport.close()
    with pytest.raises(ConfigError, match=r"'NIXL' is not allowed; expected .* pip install nixl-cu13"):
        create_transport("NIXL")
    with pytest.raises(ImportError, match="nixl_cu1"):
        nixl_api()


BOTH = ("nixl_cu12", "nixl_cu13")


@pytest.mark.parametrize(
    ("installed", "module"),
    [
        ((BOTH, "12.9"), "nixl_cu12"),
        ((BOTH, "13.0"), "nixl_cu13"),
        ((BOTH, "14.1"), "nixl_cu12"),
        ((BOTH, None), "nixl_cu12"),
        ((BOTH[1:], "12.9"), "nixl_cu13"),
    ],
    indirect=["installed"],
)
def test_the_package_for_the_cuda_of_torch_is_used_or_the_only_one(installed: None, module: str) -> None:
    assert nixl_api().__name__ == f"{module}._api"


@pytest.mark.parametrize(
    ("cuda", "found", "expected"),
    [
        ("13.0", "12", "expected nixl-cu13 .* pip install nixl-cu13==1.5.1"),
        ("12.9", "13", "expected nixl-cu12 .* pip install nixl-cu12==1.5.1"),
        ("14.1", "13", "expected torch for CUDA 12 or 13"),
    ],
)
def test_the_package_for_another_cuda_is_refused_on_a_gpu(
    cuda: str, found: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=f"'NIXL' is not allowed; {expected}"):
        require_package_for_gpus(ModuleType(f"nixl_cu{found}._api"))
    monkeypatch.setattr(torch.version, "cuda", f"{found}.0")
    require_package_for_gpus(ModuleType(f"nixl_cu{found}._api"))


# -- UCX


def test_ucx_tls_of_the_environment_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    for chosen in ("tcp", "cma,tcp", "all", "posix,cma,self,rc"):
        caplog.clear()
        assert ucx_settings("cpu", {"UCX_TLS": chosen})["UCX_TLS"] == "posix,cma,self"
        assert f"UCX_TLS={chosen} is not used" in caplog.text
    caplog.clear()
    assert ucx_settings("cpu", {"UCX_TLS": "self,cma"})["UCX_TLS"] == "posix,cma,self"
    assert "tcp" not in ucx_settings("cuda", {})["UCX_TLS"]
    assert not caplog.records


def test_a_gpu_s_memory_is_read_by_its_driver_unless_the_user_says_otherwise() -> None:
    """UCX's own default reads it through the CPU where there is no NVLink."""
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    assert ucx_settings("cuda", {})[name] == "on"
    assert ucx_settings("cuda", {name: "off"})[name] == "off"


def test_the_environment_is_as_it_was_after_an_agent_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.delenv("UCX_CMA_SEG_SIZE", raising=False)
    with ucx_environment({"UCX_TLS": "self", "UCX_CMA_SEG_SIZE": "1"}):
        assert (os.environ["UCX_TLS"], os.environ["UCX_CMA_SEG_SIZE"]) == ("self", "1")
    assert os.environ["UCX_TLS"] == "tcp"
    assert "UCX_CMA_SEG_SIZE" not in os.environ
