"""An engine core in its own process, which it or its peer can kill during a transfer.

Forked from a server that has imported everything, so an engine starts in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from trtllm_disagg.engines.embedded.ipc.messages import MadeHandoff, Rendezvous

_ANSWER_SECONDS = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.cores", "tests.support.engine_process", "numba"])


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of a process (`pid` 0: itself) in this engine's next read or write of KV: after half of the blocks, or
    after the last byte.
    """

    when: Literal["half", "after"]
    pid: int = 0


class EngineProcess:
    """`start` a command, then `wait` for its answer."""

    def __init__(self, model: Path, **args: Any) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs, model, args), daemon=True)
        self.process.start()
        theirs.close()
        said = self.wait()
        self.pid: int = said["pid"]
        self.endpoint: str = said["endpoint"]

    def start(self, command: str, **arguments: Any) -> None:
        self._pipe.send((command, arguments))

    def wait(self) -> dict[str, Any]:
        assert self._pipe.poll(_ANSWER_SECONDS), "the engine hangs"
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.start(command, **arguments)
        return self.wait()

    def has_died(self) -> bool:
        self.process.join(_ANSWER_SECONDS)
        return self.process.exitcode == -signal.SIGKILL

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


# -- the engine


def _serve(pipe: Connection, model: Path, args: dict[str, Any]) -> None:
    import torch

    from tests.support.cores import Core
    from tests.support.fake_transport import FakeTransport
    from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport

    torch.set_num_threads(1)
    fake = FakeTransport(inner=create_transport(args["cache_transceiver_config"]["backend"]))
    core = Core(model, **args, transport=fake)
    at_start = core.free_blocks
    pipe.send({"pid": os.getpid(), "endpoint": core.connector.endpoint})
    while True:
        try:
            command, asked = pipe.recv()
        except EOFError:
            return
        if kill := asked.pop("kill", None):
            _arm(fake, kill)
        match command:
            case "settle":
                while core.engine.num_active or core.engine.blocks.num_quarantined:
                    core.woken.wait(0.05)
                    core.step()
                core.assert_idle()
                pipe.send({"lost": at_start - core.free_blocks})
            case "prefill":
                handoff = core.prefill(**asked)
                pipe.send({"state": handoff.opaque_state, "first": handoff.first_gen_tokens})
            case _:
                answer = core.run(_REQUESTS[command](core, **asked))
                pipe.send({"tokens": answer.tokens, "error": answer.error, "category": answer.category})


def _decode(core: Any, prompt: list[int], state: bytes, first: list[int]) -> int:
    return int(core.add_decode(prompt, MadeHandoff(state, first, 0, "")))


def _push(core: Any, prompt: list[int], request: int) -> int:
    return int(core.add(prompt, 1, request_type="context_only", rendezvous=Rendezvous(request)))


def _expect(core: Any, prompt: list[int], request: int, endpoint: str) -> int:
    return int(core.add(prompt, request_type="generation_only", rendezvous=Rendezvous(request, endpoint)))


#: `agg` alone; `decode` what was prefilled; `push` to, and `expect` from, the other half of a request.
_REQUESTS: dict[str, Callable[..., int]] = {
    "agg": lambda core, prompt: int(core.add(prompt)),
    "decode": _decode,
    "push": _push,
    "expect": _expect,
}


def _arm(fake: Any, kill: Kill) -> None:
    from tests.support.fake_transport import Interrupted

    def deadly() -> None:
        fake.forget_script()
        _kill(kill.pid or os.getpid())

    part = {"half": 0.5, "after": 1.0}[kill.when]
    for kind in ("read", "write"):
        fake.then(kind, Interrupted(deadly, part))


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while _state(pid) not in ("Z", "X", ""):
        """Until its memory is gone."""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
