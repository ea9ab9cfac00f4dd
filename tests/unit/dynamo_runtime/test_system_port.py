"""A worker without a reachable /metrics and /health does not start."""

from __future__ import annotations

import socket

import pytest

from trtllm_disagg.dynamo_runtime.system_port import require_system_port
from trtllm_disagg.errors import ConfigError

HOST = "127.0.0.1"


def wanting(port: str) -> None:
    require_system_port({"DYN_SYSTEM_PORT": port, "DYN_SYSTEM_HOST": HOST})


def test_a_taken_port_is_named_and_free_again_later() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = str(listener.getsockname()[1])
        with pytest.raises(
            ConfigError, match=rf"DYN_SYSTEM_PORT: '{port}' is not allowed; expected a port on {HOST}"
        ):
            wanting(port)
    wanting(port)
    wanting(port)


@pytest.mark.parametrize("port", ["", "-1", "0"])
def test_missing_or_zero_system_port_is_accepted(port: str) -> None:
    wanting(port)


def test_a_number_that_is_no_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="DYN_SYSTEM_PORT: '70000' is not allowed"):
        wanting("70000")
