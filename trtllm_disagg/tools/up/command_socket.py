"""The socket in `up`'s run directory that takes commands, from its user only.

A request is one JSON line (`commands.UpCommand`). The answer is JSON lines: {"said": ...} repeatedly, then {"done":
...}, {"refused": ...} for a wrong setting or an invalid line, or {"failed": ...}. A disconnected client's command
continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from trtllm_disagg import __version__
from trtllm_disagg.admin.commands import Set
from trtllm_disagg.common.machine import peer_process
from trtllm_disagg.errors import ConfigError, DisaggError, StageTimeoutError
from trtllm_disagg.tools.up.commands import Describe, Undo, UpCommand, decode_up_command
from trtllm_disagg.tools.up.keeper import Keeper, Say
from trtllm_disagg.tools.up.plan import DISCOVERY_DIR, autoscale_spec
from trtllm_disagg.tools.up.run_dir import is_alive, read_processes
from trtllm_disagg.tools.up.supervisor import Supervisor
from trtllm_disagg.tools.up.wishes import Wish
from trtllm_disagg.tools.up.workers import UpKeeper
from trtllm_disagg.wire.kv_handle import UNREADABLE

log = logging.getLogger(__name__)

COMMAND_SOCKET = "commands.sock"
_MAX_LINE = 64 * 1024
#: Max time for a client to send its command, and to read the answer.
IDLE_SECONDS = 10.0


class DeploymentDescription(TypedDict):
    """Answer to Describe."""

    strategy: str
    namespace: str
    model: str
    url: str
    discovery: str
    #: The current one first.
    revisions: list[str]
    #: Worker processes of the current revision.
    workers: list[str]


#: The other commands answer dict[str, Any].
_ANSWERS: Mapping[type, Any] = {Describe: DeploymentDescription, Set: list[dict[str, Any]]}


class NoUpError(ConfigError):
    """No `up` serves this run directory."""


class CommandServer:
    """Executes commands from this user and root, concurrently: each changes the wish and waits."""

    def __init__(self, supervisor: Supervisor, keeper: Keeper) -> None:
        self._supervisor = supervisor
        self._keeper = keeper
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # Python 3.11 logs a connection that `cancel` ends with CancelledError.
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.shield(task)

    async def cancel(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def reply(kind: str, what: Any) -> None:
            if not writer.is_closing():  # asyncio warns of each line to a client that has gone
                writer.write(json.dumps({kind: what}).encode() + b"\n")

        try:
            with suppress(OSError):
                try:
                    line = await self._line(reader)
                    self._require_admitted(writer)
                    command = decode_up_command(line)
                    wish = Wish(self._keeper, lambda text: reply("said", text))
                    undoing = asyncio.create_task(self._undo(reader, wish))
                    try:
                        reply("done", await self._execute(command, wish))
                    finally:
                        undoing.cancel()
                except ConfigError as error:
                    reply("refused", str(error))
                except DisaggError as error:
                    reply("failed", str(error))
                except Exception as error:
                    log.exception("a command failed unexpectedly")
                    reply("failed", f"{type(error).__name__}: {error}")
                async with asyncio.timeout(IDLE_SECONDS):
                    await writer.drain()
        finally:
            writer.close()

    def _require_admitted(self, writer: asyncio.StreamWriter) -> None:
        uid = peer_process(writer.get_extra_info("socket")).uid
        if uid not in (os.geteuid(), 0):
            allowed = f"uid {os.geteuid()}, which started this `up`"
            raise ConfigError(f"command: from uid {uid}; expected {allowed}")

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await reader.readline()
        except TimeoutError:
            raise ConfigError(f"command: no line within {IDLE_SECONDS:g} s") from None
        except ValueError:
            raise ConfigError(f"command: expected one line of at most {_MAX_LINE} bytes") from None

    async def _undo(self, reader: asyncio.StreamReader, wish: Wish) -> None:
        """Reads the only message that may follow a command. A client that disconnects does not change the wish."""
        with suppress(ConfigError, OSError, ValueError):
            if (line := await reader.readline()) and isinstance(decode_up_command(line), Undo):
                wish.undo()

    async def _execute(self, command: UpCommand, wish: Wish) -> Any:
        match command:
            case Describe():
                return self._describe()
            case Undo():
                raise ConfigError("command: undo; expected it after another command, on the same connection")
        return await wish.come_true(command)

    def _describe(self) -> DeploymentDescription:
        config, keeper = self._supervisor.config, self._keeper
        others = {each.revision for each in keeper.seen} - {config.revision}
        return DeploymentDescription(
            strategy=keeper.wanted.strategy,
            namespace=config.namespace,
            model=config.served_model_name,
            url=config.base_url,
            discovery=str(config.run_dir / DISCOVERY_DIR),
            revisions=[config.revision, *sorted(others)],
            workers=[each.name for each in keeper.of()],
        )


@asynccontextmanager
async def serving_commands(supervisor: Supervisor) -> AsyncIterator[Keeper]:
    """Inside the block, the keeper runs, and `send_to_up` reaches the deployment."""
    path = supervisor.config.run_dir / COMMAND_SOCKET
    keeper = UpKeeper(supervisor)
    await keeper.look()
    keeping = asyncio.create_task(keeper.keep(), name="keeper")
    keeping.add_done_callback(supervisor.ends_with)
    commands = CommandServer(supervisor, keeper)
    server = await asyncio.start_unix_server(commands.serve, sock=listen_at(path), limit=_MAX_LINE)
    if supervisor.config.autoscale:
        supervisor.add(autoscale_spec(supervisor.config))
    try:
        yield keeper
    finally:
        server.close()
        path.unlink(missing_ok=True)
        await commands.cancel()
        keeping.cancel()
        await asyncio.wait((keeping,))


def send_to_up(
    run_dir: Path,
    command: UpCommand,
    say: Say = lambda text: None,
    *,
    deadline: float | None = None,
    undo: bool = False,
) -> Any:
    """Sends a command to the `up` of `run_dir`, waits until it is done, and returns its answer.

    Raises ConfigError for a refusal, NoUpError without `up`, DisaggError for a failure or an unreadable answer, and
    StageTimeoutError after `deadline` seconds. After that, and on Ctrl-C, `up` continues; with `undo`, it takes it
    back.
    """
    try:
        connection = connect_to(run_dir / COMMAND_SOCKET, deadline)
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError | ConnectionRefusedError)
        if is_absent and any(map(is_alive, read_processes(run_dir))):
            why = "starts, stops or was killed; try again after its line `ready`"
            raise NoUpError(f"--run-dir: the `up` of {run_dir} takes no commands now: it {why}") from None
        raise (NoUpError if is_absent else ConfigError).bad_value(
            "--run-dir", str(run_dir), f"the run directory of a running `up` ({error.strerror or error})"
        ) from None
    with connection, connection.makefile("rwb") as stream:
        stream.write(msgspec.json.encode(command) + b"\n")
        stream.flush()
        try:
            return _answer_of(run_dir, command, _lines(connection, stream, deadline), say)
        except (KeyboardInterrupt, TimeoutError) as error:
            if undo:
                stream.write(msgspec.json.encode(Undo()) + b"\n")
                stream.flush()
            say("`up` takes it back" if undo else "`up` continues with it (--undo takes it back)")
            if isinstance(error, KeyboardInterrupt):
                raise
            why = f"the `up` of {run_dir} has not finished after {deadline:g} s"
            raise StageTimeoutError(f"{why}; it may be suspended (Ctrl-Z)") from None


def _answer_of(run_dir: Path, command: UpCommand, lines: Iterator[bytes], say: Say) -> Any:
    for line in lines:
        try:
            ((kind, raw),) = msgspec.json.decode(line, type=dict[str, Any]).items()
            expected = _ANSWERS.get(type(command), dict[str, Any]) if kind == "done" else str
            what: Any = msgspec.convert(raw, expected)
        except UNREADABLE as error:
            why = f"does not answer as one of version {__version__}: {error}"
            raise DisaggError(f"the `up` of {run_dir} {why}") from None
        if kind == "done":
            return what
        if kind == "refused":
            raise ConfigError(what)
        if kind == "failed":
            raise DisaggError(what)
        say(what)
    raise DisaggError(f"`up` in {run_dir} ended before this was done")


def _lines(connection: socket.socket, stream: BufferedIOBase, seconds: float | None) -> Iterator[bytes]:
    """A line without its end: `up` has ended. Raises TimeoutError after `seconds`."""
    over = None if seconds is None else time.monotonic() + seconds
    while True:
        if over is not None:
            connection.settimeout(max(over - time.monotonic(), 0.001))
        line = next(stream, b"")
        if not line.endswith(b"\n"):
            return
        yield line


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A short name for the same file, since a Unix socket's path has at most 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen_at(path: Path) -> socket.socket:
    """A listening socket that only this user can open. Replaces a dead process's socket."""
    with ExitStack() as on_error:
        listener = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        os.fchmod(listener.fileno(), 0o600)
        path.unlink(missing_ok=True)
        with short_path(path) as name:
            listener.bind(name)
        listener.listen()
        listener.setblocking(False)
        on_error.pop_all()
    return listener


def connect_to(path: Path, seconds: float | None = None) -> socket.socket:
    """Connects; `seconds` limits every operation. Raises OSError if no process listens."""
    with ExitStack() as on_error:
        connection = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(seconds)
        with short_path(path) as name:
            connection.connect(name)
        on_error.pop_all()
    return connection
