"""A worker without a reachable /metrics and /health does not start."""

from __future__ import annotations

import socket

import pytest

from trtllm_disagg.dynamo_runtime.system_port import require_system_port
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.tools.up.ports import free_system_ports

HOST = "127.0.0.1"


def wanting(port: str) -> None:
    require_system_port({"DYN_SYSTEM_PORT": port, "DYN_SYSTEM_HOST": HOST})


def test_a_taken_port_is_named_and_free_again_later() -> None:
    (free,) = free_system_ports(1)
    port = str(free)
    refused = rf"DYN_SYSTEM_PORT: '{port}' is not allowed; expected a port on {HOST}"
    with socket.create_server((HOST, free)), pytest.raises(ConfigError, match=refused):
        wanting(port)
    wanting(port)
    wanting(port)


@pytest.mark.parametrize("port", ["", "-1", "0", "70000", "32768", "http"])
def test_a_port_that_dynamo_cannot_read_is_refused_by_the_name_of_its_variable(port: str) -> None:
    if port in ("", "-1", "0"):
        wanting(port)
    else:
        with pytest.raises(ConfigError, match=f"DYN_SYSTEM_PORT: '{port}' .*32767"):
            wanting(port)


@pytest.mark.parametrize("host", ["\N{LATIN SMALL LETTER E WITH ACUTE}" * 70, "127.0.0.1\0"])
def test_a_host_that_no_name_can_be_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"DYN_SYSTEM_HOST: .* is not allowed; expected an address"):
        require_system_port({"DYN_SYSTEM_PORT": "1", "DYN_SYSTEM_HOST": host})
