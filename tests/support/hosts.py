"""Two hosts on this machine: network namespaces with a loopback each and a cable between them; an engine core on each.

As a program it is one of the engines: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.13.1", "10.77.13.2")


def why_not() -> str:
    """Why this machine cannot play two hosts; empty when it can."""
    if shutil.which("ip") is None:
        return "no ip command (iproute2)"
    name = f"kvprobe{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"network namespaces need CAP_SYS_ADMIN: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of their namespaces."""
    names = f"kva{os.getpid()}", f"kvb{os.getpid()}"
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")
        # A namespace that goes takes its end of the cable along, and that takes the other one.
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def write_key(directory: Path, content: bytes = b"k" * 32) -> Path:
    """A key file as it should be."""
    file = directory / f"key-{content[:4].hex()}"
    file.write_bytes(content)
    file.chmod(0o600)
    return file


class Host:
    """An engine on one of them. `start` a command, then `wait` for its answer."""

    def __init__(
        self, namespace: str, address: str, model: Path, seconds: float, key: Path, backend: str
    ) -> None:
        command = [sys.executable, "-m", "tests.support.hosts", address, str(model), str(seconds), backend]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What UCX would choose by itself between two machines.
            env=os.environ
            | {"PYTHONPATH": os.getcwd(), "UCX_TLS": "tcp", "TRTLLM_DISAGG_TRANSFER_KEY_FILE": str(key)},
            text=True,
        )
        said = self.wait()
        #: `ip netns exec` becomes the command.
        self.pid: int = said["pid"]
        self.endpoint: str = said["endpoint"]

    def start(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command} | arguments) + "\n")
        self.process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self.start(command, **arguments)
        return self.wait()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


# -- the engine


def _serve(address: str, model: str, seconds: str, backend: str) -> None:
    from tests.support.cores import Core
    from tests.support.fake_transport import FakeTransport
    from trtllm_disagg.engines.embedded.ipc.messages import MadeHandoff, Rendezvous
    from trtllm_disagg.engines.embedded.kv_transfer.access import choose_scope
    from trtllm_disagg.engines.embedded.kv_transfer.transports import create_transport

    fake = FakeTransport(inner=create_transport(backend, choose_scope(address, None)))
    core = Core(
        Path(model),
        transport=fake,
        cache_transceiver_config={"backend": backend, "kv_transfer_timeout_ms": int(float(seconds) * 1000)},
        embedded={"transfer_host": address},
        enable_chunked_prefill=True,
        max_num_tokens=64,
    )

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    def answer_of(request_id: int) -> None:
        answer = core.run(request_id)
        blocks = core.engine.blocks
        say(tokens=answer.tokens, error=answer.error, quarantined=blocks.num_quarantined)

    say(pid=os.getpid(), endpoint=core.connector.endpoint)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = asked.get("prompt", [])
        match asked["do"]:
            case "agg":
                answer_of(core.add(prompt))
            case "prefill":
                handoff = core.prefill(prompt)
                say(state=handoff.opaque_state.hex(), first=handoff.first_gen_tokens)
            case "decode":
                handoff = MadeHandoff(bytes.fromhex(asked["state"]), asked["first"], 0, "")
                if victim := asked.get("stop"):
                    _stop_before_read(fake, victim)
                answer_of(core.add_decode(prompt, handoff))
            case "push":
                meeting = Rendezvous(asked["request"])
                answer_of(core.add(prompt, 1, request_type="context_only", rendezvous=meeting))
            case "expect":
                meeting = Rendezvous(asked["request"], asked["endpoint"])
                answer_of(core.add(prompt, request_type="generation_only", rendezvous=meeting))
            case "settle":
                while core.engine.blocks.num_quarantined or core.engine.num_active:
                    core.woken.wait(0.1)
                    core.step()
                core.assert_idle()
                say(quarantined=core.engine.blocks.num_quarantined)


def _stop_before_read(fake: Any, victim: int) -> None:
    """The sender has said yes, and stalls when the bytes are asked for."""
    from tests.support.fake_transport import Interrupted

    def stop() -> None:
        os.kill(victim, signal.SIGSTOP)
        while Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            """Its threads stop one by one."""

    fake.then("read", Interrupted(stop))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
