"""The socket in the run directory of an `up`, by which commands reach it; only its user may open it.

The request is one JSON line (`commands.UpCommand`). The answer is JSON lines: any number of {"said": ...}, then
{"done": ...}, {"refused": ...} for a wrong setting or a line that is no command, or {"failed": ...}. A command that has
begun is completed, even if its client has disconnected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from trtllm_disagg import __version__
from trtllm_disagg.admin.commands import (
    Describe,
    Flip,
    Rollout,
    Scale,
    Set,
    Switch,
    Undo,
    UpCommand,
    decode_up_command,
)
from trtllm_disagg.config.thresholds import check_thresholds
from trtllm_disagg.errors import ConfigError, DisaggError, StageTimeoutError
from trtllm_disagg.processes.machine import peer_process
from trtllm_disagg.tools.up.keeper import Keeper, Say
from trtllm_disagg.tools.up.plan import DISCOVERY_DIR
from trtllm_disagg.tools.up.run_dir import is_alive, read_processes
from trtllm_disagg.tools.up.supervisor import Supervisor
from trtllm_disagg.tools.up.wishes import Wish
from trtllm_disagg.wire.kv_handle import UNREADABLE

log = logging.getLogger(__name__)

COMMAND_SOCKET = "commands.sock"
_MAX_LINE = 64 * 1024
#: How long a client may take to send its command, and to read the answer.
IDLE_SECONDS = 10.0


class DeploymentDescription(TypedDict):
    """The answer to Describe."""

    strategy: str
    namespace: str
    model: str
    url: str
    discovery: str
    #: Of its workers, the current one first.
    revisions: list[str]
    #: The processes of the workers of the current one.
    workers: list[str]


_ANSWERS: Mapping[type, Any] = {
    Describe: DeploymentDescription,
    Switch: dict[str, Any],
    Set: str,
    Flip: dict[str, Any],
    Scale: dict[str, int],
    Rollout: dict[str, Any],
}


class NoUpError(ConfigError):
    """No `up` serves that run directory."""


class CommandServer:
    """Executes commands of this user's processes (and root's), side by side: each changes the wish, and waits."""

    def __init__(self, supervisor: Supervisor, keeper: Keeper) -> None:
        self._supervisor = supervisor
        self._keeper = keeper
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # Python 3.11 logs a connection that ends with CancelledError, as `cancel` ends those of a stop.
        with suppress(Exception, asyncio.CancelledError):
            await asyncio.shield(task)

    async def cancel(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(kind: str, what: Any) -> None:
            with suppress(OSError, RuntimeError):
                writer.write(json.dumps({kind: what}).encode() + b"\n")

        try:
            with suppress(OSError):
                try:
                    line = await self._line(reader)
                    self._require_admitted(writer)
                    command = decode_up_command(line)
                    wish = Wish(self._keeper, self._supervisor, lambda text: tell("said", text))
                    undoing = asyncio.create_task(self._undo(reader, wish))
                    try:
                        tell("done", await self._execute(command, wish))
                    finally:
                        undoing.cancel()
                        wish.end()
                except ConfigError as error:
                    tell("refused", str(error))
                except DisaggError as error:
                    tell("failed", str(error))
                except Exception as error:
                    log.exception("a command failed unexpectedly")
                    tell("failed", f"{type(error).__name__}: {error}")
                async with asyncio.timeout(IDLE_SECONDS):
                    await writer.drain()
        finally:
            writer.close()

    def _require_admitted(self, writer: asyncio.StreamWriter) -> None:
        uid = peer_process(writer.get_extra_info("socket")).uid
        if uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"command: from uid {uid}; expected uid {os.geteuid()}, which started this `up`"
            )

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await reader.readline()
        except TimeoutError:
            raise ConfigError(f"command: none came within {IDLE_SECONDS:g} s") from None
        except ValueError:
            raise ConfigError(f"command: expected one line of at most {_MAX_LINE} bytes") from None

    async def _undo(self, reader: asyncio.StreamReader, wish: Wish) -> None:
        """Nothing else comes on the connection of a command. One that ends leaves the wish as it is."""
        with suppress(ConfigError, OSError, ValueError):
            if (line := await reader.readline()) and isinstance(decode_up_command(line), Undo):
                wish.undo()

    async def _execute(self, command: UpCommand, wish: Wish) -> Any:
        match command:
            case Describe():
                return self._describe()
            case Set(values):
                return self._set(values)
            case Switch():
                return await wish.switch(command)
            case Flip():
                return await wish.flip(command)
            case Scale():
                return await wish.scale(command)
            case Rollout():
                return await wish.roll_out(command)
            case Undo():
                raise ConfigError("command: undo; expected it after another command, on the same connection")

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

    def _set(self, values: Mapping[str, Any]) -> str:
        """Start further workers with these thresholds; the running workers have them already."""
        check_thresholds(values, "set")
        config = self._supervisor.config
        self._supervisor.config = replace(config, thresholds={**config.thresholds, **values})
        line = ", ".join(f"{name}={value}" for name, value in values.items())
        self._supervisor.note(f"{line} from now on")
        return line


@asynccontextmanager
async def serving_commands(supervisor: Supervisor) -> AsyncIterator[Keeper]:
    """Inside the block the workers are kept as they are wanted, and `send_to_up` reaches the deployment."""
    path = supervisor.config.run_dir / COMMAND_SOCKET
    keeper = Keeper(supervisor)
    await keeper.look()
    keeping = asyncio.create_task(keeper.keep(), name="keeper")
    keeping.add_done_callback(supervisor.ends_with)
    commands = CommandServer(supervisor, keeper)
    server = await asyncio.start_unix_server(commands.serve, sock=listen_at(path), limit=_MAX_LINE)
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
    seconds: float | None = None,
    deadline: float | None = None,
    undo: bool = False,
) -> Any:
    """Send a command to the `up` of `run_dir`, wait until it is done, and return its answer. Raises ConfigError when it
    is refused, NoUpError without an `up`, DisaggError when it fails or answers what no `up` of this version does, and
    StageTimeoutError when `up` sends nothing for `seconds`, or is not done after `deadline` seconds.

    After that time, and on Ctrl-C, `up` goes on with what the command wants; with `undo` it takes that back.
    """
    try:
        connection = connect_to(run_dir / COMMAND_SOCKET, seconds)
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError | ConnectionRefusedError)
        if is_absent and any(map(is_alive, read_processes(run_dir))):
            why = "starts, stops or was killed; try again after its line `ready`"
            raise NoUpError(f"--run-dir: the `up` of {run_dir} takes no commands now: it {why}") from None
        raise (NoUpError if is_absent else ConfigError).bad_value(
            "--run-dir", str(run_dir), f"the run directory of a running `up` ({error.strerror or error})"
        ) from None
    over = None if deadline is None else time.monotonic() + deadline
    with connection, connection.makefile("rwb") as stream:
        stream.write(msgspec.json.encode(command) + b"\n")
        stream.flush()
        try:
            return _answer_of(run_dir, command, _lines(connection, stream, run_dir, seconds, over), say)
        except (KeyboardInterrupt, _DeadlineError) as error:
            if undo:
                stream.write(msgspec.json.encode(Undo()) + b"\n")
                stream.flush()
            say("`up` takes it back" if undo else "`up` goes on with it (--undo takes it back)")
            if isinstance(error, KeyboardInterrupt):
                raise
            raise StageTimeoutError(f"not done after {deadline:g} s") from None


class _DeadlineError(Exception):
    pass


def _answer_of(run_dir: Path, command: UpCommand, lines: Iterator[bytes], say: Say) -> Any:
    for line in lines:
        try:
            ((kind, raw),) = msgspec.json.decode(line, type=dict[str, Any]).items()
            what: Any = msgspec.convert(raw, _ANSWERS[type(command)] if kind == "done" else str)
        except UNREADABLE as error:
            raise DisaggError(
                f"the `up` of {run_dir} does not answer as one of version {__version__}: {error}"
            ) from None
        if kind == "done":
            return what
        if kind == "refused":
            raise ConfigError(what)
        if kind == "failed":
            raise DisaggError(what)
        say(what)
    raise DisaggError(f"`up` in {run_dir} ended before it had done this")


def _lines(
    connection: socket.socket,
    stream: BufferedIOBase,
    run_dir: Path,
    seconds: float | None,
    over: float | None,
) -> Iterator[bytes]:
    """A line without its end is the last one of an `up` that has ended."""
    while True:
        if over is not None:
            connection.settimeout(max(over - time.monotonic(), 0.001))
        try:
            line = next(stream, b"")
        except TimeoutError:
            if over is not None:
                raise _DeadlineError from None
            why = f"the `up` of {run_dir} has not answered for {seconds:g} s; it may be stopped (Ctrl-Z)"
            raise StageTimeoutError(why) from None
        if not line.endswith(b"\n"):
            return
        yield line


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A short name of the same file, because a Unix socket's address is limited to 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen_at(path: Path) -> socket.socket:
    """A listening socket that only this user can ever open. Replaces the socket of a dead process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)
        path.unlink(missing_ok=True)
        with short_path(path) as name:
            listener.bind(name)
        listener.listen()
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to(path: Path, seconds: float | None = None) -> socket.socket:
    """Connect, with `seconds` as the timeout of every operation. Raises OSError when no process listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(seconds)
    try:
        with short_path(path) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection
