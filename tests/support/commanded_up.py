"""A supervisor over workers that only serve health checks, and commands to its socket."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from trtllm_disagg.tools.up.command_socket import send_to_up
from trtllm_disagg.tools.up.commands import UpCommand
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.supervisor import Supervisor

#: A worker that serves health checks and exits on SIGTERM.
HEALTHY = """
import http.server, os, signal, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(os.environ["DYN_SYSTEM_PORT"])), Health).serve_forever()
"""


def worker_config(run_dir: Path) -> DeploymentConfig:
    return DeploymentConfig(
        strategy="decode_first",
        model="m",
        served_model_name="m",
        run_dir=run_dir,
        worker_command=(sys.executable, "-c", HEALTHY),
        startup_timeout=20,
        stop_timeout=10,
    )


async def tell(supervisor: Supervisor, wanted: UpCommand) -> tuple[Any, list[str]]:
    said: list[str] = []
    answer = await asyncio.to_thread(send_to_up, supervisor.config.run_dir, wanted, said.append)
    return answer, said
