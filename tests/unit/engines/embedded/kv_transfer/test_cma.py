"""A machine that forbids reading other processes' memory is noticed before serving starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trtllm_disagg.engines.embedded.kv_transfer.access import Network, OneHost, TransferScope
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport, needs_cma, why_no_cma

# As in a container without SYS_PTRACE: no process may read this one, and its children cannot be privileged.
_LOCKED_DOWN = """
import ctypes, logging, os
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport
from trtllm_disagg.engines.embedded.kv_transfer.access import OneHost
logging.basicConfig(level="WARNING", format="%(message)s")
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_DUMPABLE, PR_CAPBSET_DROP, CAP_SYS_PTRACE = 4, 24, 19
if os.geteuid() == 0:
    assert libc.prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0) == 0
assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
try:
    create_transport("NIXL", OneHost(), needs_cma=True)
except ConfigError as error:
    print(error)
print(create_transport("DEFAULT", OneHost(), needs_cma=True).name, create_transport("NIXL", OneHost()).name)
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


def test_default_is_nixl_where_process_vm_readv_is_allowed() -> None:
    if reason := why_no_cma():
        pytest.skip(f"this machine forbids it: {reason}")
    assert create_transport("DEFAULT", OneHost(), needs_cma=True).name == "NIXL"


@pytest.mark.parametrize(
    ("scope", "device", "needed"),
    [(OneHost(), "cpu", True), (OneHost(), "cuda", False), (Network("10.0.0.1", b"k" * 32), "cpu", False)],
    ids=repr,
)
def test_cma_is_needed_only_between_workers_on_one_host(
    scope: TransferScope, device: str, needed: bool
) -> None:
    assert needs_cma(scope, device) is needed
