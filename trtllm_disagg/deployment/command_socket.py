"""What a running `up` can be told, through a socket in its run directory that only its user may open.

One JSON line asks, JSON lines answer: any number of {"said": ...}, then {"done": ...}, {"refused": ...} for a setting
that is wrong, or {"failed": ...}. An order that was begun is carried out, even if its giver has gone. Whatever does not
ask so is answered {"refused": ...} too, within seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trtllm_disagg.config.thresholds import check_thresholds
from trtllm_disagg.deployment.limits import free_system_ports
from trtllm_disagg.deployment.plan import (
    STRATEGIES,
    WORKER_ROLES,
    ProcessSpec,
    Role,
    Strategy,
    queue_flags,
    shared_env,
    worker_spec,
)
from trtllm_disagg.deployment.process import ManagedProcess
from trtllm_disagg.deployment.supervisor import Supervisor
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.peer_process import peer_process

# More or fewer workers of a deployment that serves.


#: Each is a process of its own; a slip of the finger shall not take the machine.
MOST_WORKERS = 64


@dataclass(frozen=True)
class Scaler:
    supervisor: Supervisor

    async def scale(self, wanted: Mapping[Role, int], say: Callable[[str], None]) -> str:
        """Until as many workers of each role run as `wanted` says; other roles stay as they are. New ones come
        first, then the youngest go, one by one, each when its requests have ended. The line that says what runs.

        Raises ConfigError before anything is changed, DeploymentFailedError when a new worker does not come up.
        """
        self._check(wanted)
        await self._add_all(self._missing(wanted), say)
        for role, count in wanted.items():
            for process in self._running(role)[count:][::-1]:
                say(f"{process.name} finishes its requests and leaves")
                obeyed = await self.supervisor.remove(process)
                say(f"{process.name} has left" + ("" if obeyed else f" ({process.describe_end()})"))
        counts = Counter(process.role for process in self.supervisor.processes if process.stays)
        roles = WORKER_ROLES[self.supervisor.config.strategy]
        return "scaled: " + ", ".join(f"{counts[role]} {role}" for role in roles)

    def _missing(self, wanted: Mapping[Role, int]) -> list[ProcessSpec]:
        config = self.supervisor.config
        names = [
            (role, self._next_index(role) + i)
            for role, count in wanted.items()
            for i in range(count - len(self._running(role)))
        ]
        env, ports = shared_env(config, os.environ), free_system_ports(len(names))
        services = list(queue_flags(process.spec for process in self.supervisor.processes))
        return [
            worker_spec(config, role, index, env, port, services)
            for (role, index), port in zip(names, ports, strict=True)
        ]

    async def _add_all(self, specs: Iterable[ProcessSpec], say: Callable[[str], None]) -> None:
        """Side by side. When one does not come up, the others are waited for, and stay."""

        async def add(spec: ProcessSpec) -> None:
            say(f"{spec.name} starts")
            process = await self.supervisor.add(spec)
            say(f"{process.name} is ready (pid {process.pid})")

        for outcome in await asyncio.gather(*map(add, specs), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _check(self, wanted: Mapping[Role, int]) -> None:
        roles = WORKER_ROLES[self.supervisor.config.strategy]
        for role, count in wanted.items():
            if role not in roles:
                raise ConfigError.bad_value(
                    f"--{role}",
                    count,
                    f"one of {', '.join('--' + name for name in roles)}: "
                    f"{self.supervisor.config.strategy} has no other workers",
                )
            if not 1 <= count <= MOST_WORKERS:
                raise ConfigError.bad_value(f"--{role}", count, f"1 to {MOST_WORKERS} workers")

    def _running(self, role: Role) -> list[ManagedProcess]:
        return [process for process in self.supervisor.processes if process.role == role and process.stays]

    def _next_index(self, role: Role) -> int:
        """No name is used twice, so that no log is written over."""
        names = [path.stem for path in self.supervisor.config.run_dir.glob(f"{role}-*.log")]
        numbers = [int(number) for name in names if (number := name.removeprefix(f"{role}-")).isdigit()]
        return max(numbers, default=-1) + 1


# A Unix socket in a directory, however long the path of that is.


ORDERS_SOCKET = "orders.sock"


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The same file; a socket's address has room for 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path) -> socket.socket:
    """For this user only, from its first moment on. One that a dead process left behind is replaced."""
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


def connect(path: Path) -> socket.socket:
    """Raises OSError when no process listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


_MAX_LINE = 64 * 1024
#: Of what comes behind an order that is too long: it is read, so that its sender can read the answer.
_MAX_REST = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the connections to the socket. A connection whose order is being carried out stays as long as that takes."""

    connections: int = 32
    #: How long one may take to say what it wants, and to take the answer.
    idle_seconds: float = 10.0


LIMITS = Limits()

Say = Callable[[str], None]


class Describe(msgspec.Struct, frozen=True, tag_field="order", tag="describe", forbid_unknown_fields=True):
    """What is this deployment?"""


class Scale(msgspec.Struct, frozen=True, tag_field="order", tag="scale", forbid_unknown_fields=True):
    """As many workers as `workers` says, by role."""

    workers: dict[Role, int]


class Switched(msgspec.Struct, frozen=True, tag_field="order", tag="switched", forbid_unknown_fields=True):
    """The workers run `strategy` now; those to come shall too."""

    strategy: Literal["prefill_first", "decode_first", "auto"]


class ThresholdsSet(msgspec.Struct, frozen=True, tag_field="order", tag="set", forbid_unknown_fields=True):
    """The workers have these thresholds now; those to come shall too."""

    values: dict[str, int | float]


Order = Describe | Scale | Switched | ThresholdsSet


class Orders:
    """Carries out one order at a time, of this user's processes (and root's)."""

    def __init__(self, supervisor: Supervisor, limits: Limits) -> None:
        self._supervisor = supervisor
        self._limits = limits
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        with suppress(Exception):
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
                    self._require_admitted(writer)
                    order = _order(await self._line(reader))
                    tell("done", await self._carry_out(order, lambda text: tell("said", text)))
                except ConfigError as error:
                    tell("refused", str(error))
                except DisaggError as error:
                    tell("failed", str(error))
                async with asyncio.timeout(self._limits.idle_seconds):
                    await writer.drain()
                    writer.write_eof()
                    await _read_rest(reader)
        finally:
            writer.close()

    def _require_admitted(self, writer: asyncio.StreamWriter) -> None:
        uid = peer_process(writer.get_extra_info("socket")).uid
        if uid not in (os.geteuid(), 0):
            raise ConfigError(f"order: from uid {uid}; expected uid {os.geteuid()}, which started this `up`")
        if len(self._running) > self._limits.connections:
            raise ConfigError(f"order: more than {self._limits.connections} connections at once; try again")

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                return await reader.readline()
        except TimeoutError:
            raise ConfigError(f"order: none came within {self._limits.idle_seconds:g} s") from None
        except ValueError:
            raise ConfigError(f"order: expected one line of at most {_MAX_LINE} bytes") from None

    async def _carry_out(self, order: Order, say: Say) -> Any:
        if isinstance(order, Describe):
            return self._description()
        async with self._one_at_a_time:
            if isinstance(order, Switched):
                return self._switched(order.strategy)
            if isinstance(order, ThresholdsSet):
                return self._set(order.values)

            def note(text: str) -> None:
                self._supervisor.note(text)
                say(text)

            return await Scaler(self._supervisor).scale(order.workers, note)

    def _description(self) -> dict[str, Any]:
        config = self._supervisor.config
        return {
            "strategy": config.strategy,
            "namespace": config.namespace,
            "model": config.served_model_name,
            "url": config.base_url,
            "discovery": str(config.run_dir / "discovery"),
        }

    def _switched(self, strategy: Strategy) -> str:
        if WORKER_ROLES[strategy] != WORKER_ROLES[self._supervisor.config.strategy]:
            raise ConfigError.bad_value("strategy", strategy, "one that these workers can run")
        self._supervisor.config = replace(self._supervisor.config, strategy=strategy)
        self._supervisor.note(f"strategy={strategy} from now on")
        return strategy

    def _set(self, values: Mapping[str, int | float]) -> str:
        check_thresholds(values, "set")
        config = self._supervisor.config
        self._supervisor.config = replace(config, thresholds={**config.thresholds, **values})
        line = ", ".join(f"{name}={value}" for name, value in values.items())
        self._supervisor.note(f"{line} from now on")
        return line


@asynccontextmanager
async def taking_orders(supervisor: Supervisor, limits: Limits = LIMITS) -> AsyncIterator[None]:
    """Inside the block the deployment can be told to change."""
    path = supervisor.config.run_dir / ORDERS_SOCKET
    orders = Orders(supervisor, limits)
    server = await asyncio.start_unix_server(orders.serve, sock=listen(path), limit=_MAX_LINE)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        await orders.cancel()


def order(run_dir: Path, wanted: Order, say: Say = lambda text: None) -> Any:
    """Tell the `up` of `run_dir`, and wait until it is done; what it answers. Raises ConfigError when it refuses or
    no `up` is there, DisaggError when it fails.
    """
    try:
        connection = connect(run_dir / ORDERS_SOCKET)
    except OSError as error:
        raise ConfigError.bad_value(
            "--run-dir", str(run_dir), f"the run directory of a running `up` ({error.strerror or error})"
        ) from None
    with connection, connection.makefile("rwb") as stream:
        stream.write(msgspec.json.encode(wanted) + b"\n")
        stream.flush()
        for line in stream:
            ((kind, what),) = json.loads(line).items()
            if kind == "done":
                return what
            if kind == "refused":
                raise ConfigError(what)
            if kind == "failed":
                raise DisaggError(what)
            say(what)
    raise DisaggError(f"`up` in {run_dir} ended before it had done this")


async def _read_rest(reader: asyncio.StreamReader) -> None:
    left = _MAX_REST
    while left > 0 and (part := await reader.read(_MAX_LINE)):
        left -= len(part)


def _order(line: bytes) -> Order:
    try:
        found: Order = msgspec.json.decode(line, type=Order)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"order: {error}; strategies are {', '.join(STRATEGIES)}") from None
    return found
