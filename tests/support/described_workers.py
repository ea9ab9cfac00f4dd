"""Stand-ins of frontend and workers that describe themselves and take commands on their system ports, and an `up` over
them. Without engine and Dynamo, a start takes 0.1 s.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_disagg.tools.up.command_socket import send_to_up, serving_commands
from trtllm_disagg.tools.up.commands import UpCommand
from trtllm_disagg.tools.up.keeper import Keeper
from trtllm_disagg.tools.up.lifecycle import prepare
from trtllm_disagg.tools.up.plan import Backoff, DeploymentConfig
from trtllm_disagg.tools.up.status import Status
from trtllm_disagg.tools.up.supervisor import Supervisor

SECONDS = 30.0

#: Files below --faults: `crash-REVISION` (its workers die at start), `mute-REVISION` (the frontend answers none of its
#: requests), `refuse` (no worker flips), `slow` (a flip waits until this is removed), `back` (a flipped worker returns
#: to its role).
SCRIPT = """
import argparse, http.server, json, os, secrets, signal, sys, threading, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--http-port", type=int)
parser.add_argument("--disaggregation-mode", default="frontend")
parser.add_argument("--disaggregation-strategy", default="agg")
parser.add_argument("--served-model-name", default="toy")
parser.add_argument("--model", default="")
parser.add_argument("--faults", type=Path)
args, _ = parser.parse_known_args()
revision = os.environ.get("DYN_NAMESPACE_WORKER_SUFFIX", "")
FIRST = {"decode_first": "decode", "auto": "decode", "prefill_first": "prefill", "agg": "agg"}
known = args.faults / "known"
known.mkdir(exist_ok=True)

def fault(name):
    return (args.faults / name).exists()

class Worker:
    def __init__(self):
        self.role, self.strategy = args.disaggregation_mode, args.disaggregation_strategy
        self.becomes, self.flipped_from, self.state = "", "", "serving"
        self.enter()
    def enter(self):
        self.instance = secrets.token_hex(6)
        self.tell()
    def tell(self):
        self.first = FIRST.get(self.strategy) == self.role
        if self.first:
            (known / str(int(self.instance, 16))).write_text(revision)
        else:
            (known / str(int(self.instance, 16))).unlink(missing_ok=True)
    def describe(self):
        return dict(instance=self.instance, role=self.role, strategy=self.strategy, model=args.served_model_name,
                    registered=self.first, client_requests=0, ready=self.state == "serving", revision=revision,
                    state=self.state, becomes=self.becomes, flipped_from=self.flipped_from,
                    process=Path(os.environ["TRTLLM_DISAGG_ACTIVITY_FILE"]).stem)
    def command(self, command):
        match command:
            case {"command": "switch", "to": to}:
                self.strategy = to
                self.tell()
                return self.describe()
            case {"command": "flip", "to": to}:
                if fault("refuse"):
                    raise ValueError("to: no flip here")
                self.becomes, self.state = to, "draining"
                threading.Thread(target=self.flip, args=(to,), daemon=True).start()
                return {"warnings": []}
            case {"command": "set", "values": values}:
                return {"changed": [*values]}
            case {"command": "leave"}:
                threading.Timer(0.05, os._exit, (0,)).start()
                return {"requests_left": 0}
    def flip(self, to):
        while fault("slow"):
            time.sleep(0.01)
        (known / str(int(self.instance, 16))).unlink(missing_ok=True)
        if not fault("back"):
            self.role = to
        self.becomes, self.state, self.flipped_from = "", "serving", self.instance
        self.enter()

is_frontend = args.disaggregation_mode == "frontend"
if not is_frontend and fault("crash-" + revision):
    print("error: no such weights", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
worker = None if is_frontend else Worker()

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.answer(200, {"data": [{"id": "toy"}]})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if is_frontend:
            instance = self.headers["x-dynamo-worker-instance-id"]
            there = known / instance
            if not there.exists() or (fault("mute-" + there.read_text()) and "annotations" not in body["nvext"]):
                return self.answer(503, {"error": "no such worker"})
            return self.answer(200, {"choices": [1], "nvext": {"worker_id": {"decode_worker_id": int(instance)}}})
        if "trtllm_disagg.control" in body:
            order = json.loads(body["trtllm_disagg.control"]["order"])
            try:
                return self.answer(200, {"answer": worker.command(order["command"])})
            except ValueError as error:
                return self.answer(200, {"error": {"message": str(error), "code": "InvalidRequest"}})
        self.answer(200, worker.describe())
    def log_message(self, *_):
        pass

port = args.http_port or int(os.environ["DYN_SYSTEM_PORT"])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Said(Status):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Running:
    """An `up` that loads, watches and restarts its processes."""

    supervisor: Supervisor
    keeper: Keeper
    said: Said
    faults: Path

    async def tell(self, command: UpCommand, **options: Any) -> Any:
        return await asyncio.to_thread(send_to_up, self.supervisor.config.run_dir, command, **options)

    async def until(self, is_so: Any) -> None:
        async with asyncio.timeout(SECONDS):
            while not is_so():
                self.supervisor.has_changed.set()
                await self.keeper.next_look()

    def roles(self) -> dict[str, str]:
        """Worker -> role, by `processes.json`."""
        return {each.name: each.role for each in self.supervisor.processes if each.role != "frontend"}

    def pid(self, name: str) -> int:
        return next(each.pid for each in self.supervisor.processes if each.name == name)


@asynccontextmanager
async def running(directory: Path, **settings: Any) -> AsyncIterator[Running]:
    faults, script = directory / "faults", directory / "worker.py"
    faults.mkdir()
    script.write_text(SCRIPT)
    command = (sys.executable, "-S", str(script), "--faults", str(faults))
    defaults: dict[str, Any] = {
        "strategy": "decode_first",
        "model": "toy",
        "served_model_name": "toy",
        "run_dir": directory / "run",
        "http_port": 0,
        "worker_command": command,
        "frontend_command": command,
        "backoff": Backoff(0.05, 0.1),
    }
    said = Said()
    supervisor = prepare(DeploymentConfig(**defaults | settings), said)
    try:
        await supervisor.load()
        watching = asyncio.create_task(supervisor.watch())
        async with serving_commands(supervisor) as keeper:
            yield Running(supervisor, keeper, said, faults)
        if watching.done():
            watching.result()
        watching.cancel()
        await supervisor.drain()
    finally:
        await supervisor.kill()
