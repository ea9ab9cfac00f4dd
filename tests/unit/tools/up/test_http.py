"""Which requests of commands go through the proxy of the environment, and how much of an answer they wait for."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from trtllm_disagg.tools.up import http
from trtllm_disagg.tools.up.http import ask

SECONDS = 30.0


class Server:
    """Answers every request, and keeps what was asked of it: a proxy is asked for whole URLs."""

    def __init__(self) -> None:
        asked = self.asked = list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *args: object) -> None:
                """Not on stderr."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.http.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(autouse=True)
def no_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
async def test_a_server_on_this_machine_is_asked_without_the_proxy(
    server: Server, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await ask(server.url(host) + "/v1/models", SECONDS) == (200, b"ok")
    assert server.asked == ["/v1/models"]


@pytest.mark.parametrize("host", ["frontend.invalid", "192.0.2.1", "[2001:db8::1]"])
async def test_another_machine_is_asked_through_the_proxy(
    server: Server, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url())
    assert await ask(f"http://{host}:8000/health", SECONDS) == (200, b"ok")
    assert server.asked == [f"http://{host}:8000/health"]


async def test_servers_that_do_not_answer_delay_no_other(server: Server) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(40)]
        waiting = [
            asyncio.create_task(http.get("127.0.0.1", each.getsockname()[1], "/metrics")) for each in silent
        ]
        await asyncio.sleep(0)  # they ask first
        answer = await http.get("127.0.0.1", server.http.server_port, "/metrics")
        assert (answer, sum(each.done() for each in waiting)) == ((200, b"ok"), 0)
    await asyncio.gather(*waiting)


@pytest.fixture(params=[b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["headers", "body"])
def endless(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server with an answer that never ends: a byte comes each 10 ms."""
    closed = threading.Event()

    def answer() -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.sendall(request.param)
                while not closed.wait(0.01):
                    connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer)
        answering.start()
        yield listening.getsockname()[1]
        closed.set()
        answering.join()


async def test_an_answer_that_never_ends_is_none(endless: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT_SECONDS", 0.2)
    assert await http.get("127.0.0.1", endless, "/metrics") == (0, b"")


async def test_a_url_with_an_answer_that_never_ends_is_given_up_at_the_timeout(endless: int) -> None:
    with pytest.raises(TimeoutError):
        await ask(f"http://127.0.0.1:{endless}/", 0.2)


async def test_an_answer_that_is_too_long_is_not_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await http.get("127.0.0.1", server.http.server_port, "/") == (200, b"ok")
    assert await ask(server.url(), SECONDS) == (200, b"ok")
    monkeypatch.setattr(http, "MAX_BYTES", 1)
    assert await http.get("127.0.0.1", server.http.server_port, "/") == (0, b"")
    with pytest.raises(OSError, match="an answer of more than"):
        await ask(server.url(), SECONDS)
