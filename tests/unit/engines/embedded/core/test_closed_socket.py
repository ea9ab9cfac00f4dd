"""An engine process that closes its socket and stays, in one of its libraries' exit say: no caller waits for it."""

from __future__ import annotations

import queue
import sys

import pytest

from tests.support.deployments import wait_until
from trtllm_disagg.engines.embedded.core.core_client import CoreClient
from trtllm_disagg.engines.embedded.ipc.messages import AbortRequest
from trtllm_disagg.engines.embedded.tensor_parallel.launch import Launch
from trtllm_disagg.errors import EngineError

#: Says what its argument says, then closes, and stays until it is killed.
STAYS = """
import json, sys, threading
import msgspec
from trtllm_disagg.engines.embedded.ipc.sockets import Link
from trtllm_disagg.engines.embedded.ipc.sockets import connect
from trtllm_disagg.engines.embedded.ipc.messages import Command, Ready
link = Link(connect(json.loads(sys.stdin.readline())["address"]), msgspec.msgpack.Decoder(Command))
if sys.argv[1] == "ready":
    link.send(Ready(1, 32, 100, 64, "", [], []))
    link.receive(wait=True)
link.close()
threading.Event().wait()
"""


def client(said: str, died: queue.SimpleQueue[str]) -> CoreClient:
    return CoreClient(
        {},
        num_threads=1,
        on_report=lambda _: None,
        on_death=died.put,
        launch=lambda *_: Launch((sys.executable, "-c", STAYS, said), {}),
        end_seconds=0.3,
    )


def test_closed_engine_socket_marks_the_engine_dead_and_ends_its_process() -> None:
    died: queue.SimpleQueue[str] = queue.SimpleQueue()
    core = client("ready", died)
    core.send(AbortRequest(1))
    assert died.get(timeout=20) == "the engine process has closed its socket"
    wait_until(lambda: not core.alive, "the engine is known to be dead", 20)
    core.close()


def test_engine_that_closes_its_socket_at_the_start_raises_an_engine_error() -> None:
    with pytest.raises(EngineError, match="ended with exit code -9 while starting"):
        client("nothing", queue.SimpleQueue())
