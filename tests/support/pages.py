"""An HTTP server with fixed pages in place of a frontend."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trtllm_disagg.tools.up.plan import LOOPBACK


class Pages(ThreadingHTTPServer):
    """Serves path -> status and body; records requests."""

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), _Handler)
        self.pages: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, Any]] = []
        #: Bytes that each answer announces but lacks.
        self.num_missing = 0

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Pages

    def do_GET(self) -> None:
        status, body = self.server.pages.get(self.path, (404, {"message": "Not Found"}))
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content) + self.server.num_missing))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Not into the tests' output."""
