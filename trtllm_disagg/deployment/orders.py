"""What a running `up` can be told, through a socket in its run directory that only its user may open.

One JSON line asks, JSON lines answer: any number of {"said": ...}, then {"done": ...}, {"refused": ...} for a setting
that is wrong, or {"failed": ...}. An order that was begun is carried out, even if its giver has gone. Whatever does not
ask so is answered {"refused": ...} too, within seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from trtllm_disagg.deployment.plan import STRATEGIES, WORKER_ROLES, Role, Strategy
from trtllm_disagg.deployment.scaling import Scaler
from trtllm_disagg.deployment.socket_file import ORDERS_SOCKET, connect, listen, peer_uid
from trtllm_disagg.deployment.supervisor import Supervisor
from trtllm_disagg.errors import ConfigError, DisaggError
from trtllm_disagg.thresholds import check_thresholds

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
        uid = peer_uid(writer.get_extra_info("socket"))
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
