"""A NATS server with JetStream as a process that tests can kill and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_disagg.tools.up.brokers import nats_server_argv
from trtllm_disagg.tools.up.http import NATS_HEALTH
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.tools.up.ports import free_system_ports

_START_SECONDS = 10.0
_POLL_SECONDS = 0.01


class NatsServer:
    """Keeps its port and its store over restarts."""

    def __init__(
        self,
        store: Path,
        *,
        jetstream: bool = True,
        flags: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self._health_port = free_system_ports(2)
        self._store = store
        self._jetstream = jetstream
        self._flags = flags
        self._env = os.environ | (env or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        argv = nats_server_argv(LOOPBACK, self.port, self._health_port, self._store)
        if not self._jetstream:
            argv = tuple(argument for argument in argv if argument != "--jetstream")
        self._process = subprocess.Popen(
            (*argv, *self._flags),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=self._env,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            assert time.monotonic() < deadline, "nats-server does not come up"
            time.sleep(_POLL_SECONDS)

    def forget(self, store: Path) -> None:
        """Replace the server's store by `store` at the next start."""
        self._store = store

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, the server accepts connections but never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _is_healthy(self) -> bool:
        path = NATS_HEALTH if self._jetstream else "/healthz"
        url = f"http://{LOOPBACK}:{self._health_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@contextmanager
def nats_server(store: Path, **options: Any) -> Iterator[NatsServer]:
    server = NatsServer(store, **options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
