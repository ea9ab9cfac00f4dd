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
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from trtllm_disagg import __version__
from trtllm_disagg.admin.commands import Describe, Rollout, Scale, Set, Switch, UpCommand, decode_up_command
from trtllm_disagg.config.thresholds import check_thresholds
from trtllm_disagg.errors import ConfigError, DisaggError, StageTimeoutError
from trtllm_disagg.processes.machine import peer_process
from trtllm_disagg.strategies import spec_of, switchable
from trtllm_disagg.tools.up.plan import DISCOVERY_DIR
from trtllm_disagg.tools.up.run_dir import is_alive, read_processes
from trtllm_disagg.tools.up.scaler import Say, Scaler
from trtllm_disagg.tools.up.supervisor import Supervisor
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


_ANSWERS: Mapping[type, Any] = {
    Describe: DeploymentDescription,
    Switch: str,
    Set: str,
    Scale: dict[str, int],
    Rollout: str,
}


class NoUpError(ConfigError):
    """No `up` serves that run directory."""


class CommandServer:
    """Executes commands of this user's processes (and root's); scales one at a time."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._one_at_a_time = asyncio.Lock()
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
                    tell("done", await self._execute(command, lambda text: tell("said", text)))
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

    async def _execute(self, command: UpCommand, say: Say) -> Any:
        if isinstance(command, Describe):
            config = self._supervisor.config
            return DeploymentDescription(
                strategy=config.strategy,
                namespace=config.namespace,
                model=config.served_model_name,
                url=config.base_url,
                discovery=str(config.run_dir / DISCOVERY_DIR),
                revisions=[config.revision, *Scaler(self._supervisor).other_revisions()],
            )
        if isinstance(command, Switch):
            return self._switch(command.to)
        if isinstance(command, Set):
            return self._set(command.values)
        async with self._one_at_a_time:

            def note(text: str) -> None:
                self._supervisor.note(text)
                say(text)

            scaler = Scaler(self._supervisor)
            if isinstance(command, Rollout):
                return await scaler.roll_out(command, note)
            return await scaler.scale(command.workers, note)

    def _switch(self, to: str) -> str:
        """Start further workers with `to`; the running workers have been switched already."""
        config = self._supervisor.config
        if to not in switchable() or spec_of(to).roles != spec_of(config.strategy).roles:
            raise ConfigError.bad_value("strategy", to, "one that these workers can run")
        self._supervisor.config = replace(config, strategy=to)
        self._supervisor.note(f"strategy={to} from now on")
        return to

    def _set(self, values: Mapping[str, Any]) -> str:
        """Start further workers with these thresholds; the running workers have them already."""
        check_thresholds(values, "set")
        config = self._supervisor.config
        self._supervisor.config = replace(config, thresholds={**config.thresholds, **values})
        line = ", ".join(f"{name}={value}" for name, value in values.items())
        self._supervisor.note(f"{line} from now on")
        return line


@asynccontextmanager
async def serving_commands(supervisor: Supervisor) -> AsyncIterator[None]:
    """Inside the block `send_to_up` reaches the deployment."""
    path = supervisor.config.run_dir / COMMAND_SOCKET
    commands = CommandServer(supervisor)
    server = await asyncio.start_unix_server(commands.serve, sock=listen_at(path), limit=_MAX_LINE)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        await commands.cancel()


def send_to_up(
    run_dir: Path, command: UpCommand, say: Say = lambda text: None, *, seconds: float | None = None
) -> Any:
    """Send a command to the `up` of `run_dir`, wait until it is done, and return its answer. Raises ConfigError when it
    is refused, NoUpError without an `up`, DisaggError when it fails or answers what no `up` of this version does, and
    StageTimeoutError when `up` sends nothing for `seconds`.
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
    with connection, connection.makefile("rwb") as stream:
        stream.write(msgspec.json.encode(command) + b"\n")
        stream.flush()
        while line := _line_of(stream, run_dir, seconds):
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


def _line_of(stream: Iterator[bytes], run_dir: Path, seconds: float | None) -> bytes:
    """Empty at the end. A line without its end is the last one of an `up` that has ended."""
    try:
        line = next(stream, b"")
    except TimeoutError:
        why = f"the `up` of {run_dir} has not answered for {seconds:g} s; it may be stopped (Ctrl-Z)"
        raise StageTimeoutError(why) from None
    return line if line.endswith(b"\n") else b""


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
