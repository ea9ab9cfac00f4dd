"""Which worker opens which prefill queue, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from tests.support.nats_server import nats_server
from tests.support.recording_pair import recording_engine
from trtllm_disagg import prefill_queue
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError, QueueUnusableError
from trtllm_disagg.prefill_queue import NatsQueue, WorkerQueue, open_prefill_queue
from trtllm_disagg.prefill_queue.broker import Broker, NatsClient, QueueLimits, preserve_cancellation
from trtllm_disagg.prefill_queue.tickets import Names
from trtllm_disagg.strategies import switchable
from trtllm_disagg.tools.up.brokers import NATS_CONFIG, nats_url, new_nats_password
from trtllm_disagg.tools.up.plan import LOOPBACK


async def test_worker_without_queue_dispatch_opens_no_prefill_queue() -> None:
    config = WorkerConfig(model="m", role=Role.PREFILL)
    assert type(await open_prefill_queue(config, "kind")) is WorkerQueue
    assert type(await open_prefill_queue(WorkerConfig(model="m"), "kind")) is WorkerQueue


@pytest.mark.parametrize("component", [None, "mine"])
def test_queue_name_does_not_depend_on_role_and_strategy(component: str | None) -> None:
    """A deployment that switched has workers that were started under either strategy."""
    place = component and f"dyn://dynamo.{component}.generate"
    roles: tuple[tuple[Role, dict[str, Any]], ...] = (
        (Role.PREFILL, {"endpoint": place}),
        (Role.DECODE, {"next_endpoint": place}),
    )
    configs = [
        WorkerConfig(model="m", role=role, strategy=strategy, prefill_dispatch="queue", **at)
        for strategy in (["decode_first"] if component else switchable())
        for role, at in roles
    ]
    assert {Names.of(config, "kind").tickets for config in configs} == {
        f"trtllm_disagg.prefill_queue.dynamo.{component or 'prefill'}.generate.kind.tickets"
    }


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("strategy", switchable())
async def test_a_worker_that_may_push_after_a_switch_opens_it(role: Role, strategy: str) -> None:
    config = WorkerConfig(
        model="m", role=role, strategy=strategy, prefill_dispatch="queue", nats_server="nats://127.0.0.1:1"
    )
    with pytest.raises(ConfigError, match="--nats-server"):
        await open_prefill_queue(config, "kind", QueueLimits(connect=0.1))


@pytest.mark.parametrize("password", ["secret", "p@secret"])
async def test_missing_nats_server_is_refused_without_its_password(password: str) -> None:
    url = f"nats://me:{password}@127.0.0.1:1"
    config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server=url)
    with pytest.raises(ConfigError) as raised:
        await open_prefill_queue(config, "kind", QueueLimits(connect=0.3))
    said = str(raised.value)
    assert said.startswith("--nats-server: 'nats://***@127.0.0.1:1' ")
    assert "secret" not in said
    assert "JetStream" in said


class HangingClient(NatsClient):
    """As NATS's after a TLS handshake that failed at a bad moment: a cancel is lost, and it waits for ever."""

    async def connect(self, *args: Any, **options: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def close(self) -> None:
        await asyncio.Event().wait()


class FrozenServersClient(HangingClient):
    """Of a server that takes connections and says nothing."""

    last_error = TimeoutError()


@pytest.mark.parametrize("client", [HangingClient, FrozenServersClient])
async def test_a_client_that_hangs_is_given_up_in_time_with_a_reason(client: type[NatsClient]) -> None:
    names = Names.of(WorkerConfig(model="m", role=Role.PREFILL), "kind")
    async with asyncio.timeout(20):
        with pytest.raises(ConfigError, match="no answer"):
            await Broker.connect("nats://127.0.0.1:1", names, QueueLimits(connect=0.1, reply=0.1), client())


async def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    with nats_server(tmp_path, jetstream=False) as server:
        config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server=server.url)
        with pytest.raises(ConfigError, match="this server has no JetStream"):
            await open_prefill_queue(config, "kind")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """(certificate, key) of a server on loopback, self-signed."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=nats"
    )
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return certificate, key


async def test_the_nats_server_of_a_deployment_takes_only_clients_with_its_password(tmp_path: Path) -> None:
    """Its port is open to every user of the host: all of them could take tickets there."""
    password = new_nats_password()
    with nats_server(tmp_path, flags=NATS_CONFIG, env=password) as server:
        url = nats_url(LOOPBACK, server.port, password)
        config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server=url)
        for wrong in (server.url, nats_url(LOOPBACK, server.port, new_nats_password())):
            with pytest.raises(ConfigError, match="Authorization Violation"):
                await open_prefill_queue(replace(config, nats_server=wrong), "kind", QueueLimits(connect=1.0))
        await (await open_prefill_queue(config, "kind", QueueLimits())).aclose()


async def test_tls_url_connects_only_to_a_server_with_tls(
    tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that offers none gets neither a password nor a prompt."""
    limits = QueueLimits(connect=1.0)
    secured = ("--tls", "--tlscert", str(certificate[0]), "--tlskey", str(certificate[1]))
    for name, flags in (("plain", ()), ("secured", secured)):
        with nats_server(tmp_path / name, flags=flags) as server:
            url = server.url.replace("nats://", "tls://")
            config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server=url)
            with pytest.raises(ConfigError, match="TLS" if name == "plain" else "certificate verify failed"):
                await open_prefill_queue(config, "kind", limits)
            if name == "secured":
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
                await (await open_prefill_queue(config, "kind", limits)).aclose()


async def test_a_worker_that_has_left_before_it_starts_takes_no_ticket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_queue, "expose", lambda *_: None)
    config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue")
    broker = Broker(Names.of(config, "kind"), QueueLimits(), NatsClient())
    queue = NatsQueue(config, broker)
    await queue.leave()
    before = asyncio.all_tasks()
    await queue.start(recording_engine(), 1, object())
    assert asyncio.all_tasks() == before


class BreaksAtOnce(Broker):
    """A connection that works once, to make the stream, and then never."""

    closed: ClassVar[list[Broker]] = []

    @classmethod
    async def connect(
        cls, servers: str, names: Names, limits: QueueLimits | None = None, client: NatsClient | None = None
    ) -> Self:
        return cls(names, limits or QueueLimits(), client or NatsClient())

    @contextlib.asynccontextmanager
    async def listening(self, subject: str, handle: object) -> AsyncIterator[None]:
        self._fail()
        yield

    def _fail(self) -> None:
        raise QueueUnusableError("NATS is gone")

    async def close(self) -> None:
        self.closed.append(self)


async def test_a_connection_that_breaks_while_the_queue_is_opened_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trtllm_disagg.prefill_queue.broker.Broker", BreaksAtOnce)
    config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue")
    with pytest.raises(QueueUnusableError, match="NATS is gone"):
        await open_prefill_queue(config, "kind")
    assert len(BreaksAtOnce.closed) == 1


async def test_a_cancel_that_comes_with_the_result_is_not_lost() -> None:
    async def ask(answer: asyncio.Future[int], keep: bool) -> int:
        waiting = asyncio.wait_for(answer, 5)
        return await (preserve_cancellation(waiting) if keep else waiting)

    async def cancelled_with_the_result(keep: bool) -> bool:
        answer = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(ask(answer, keep))
        await asyncio.sleep(0)
        answer.set_result(1)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert await cancelled_with_the_result(keep=True)
    if sys.version_info < (3, 12):
        assert not await cancelled_with_the_result(keep=False), "else there is no need for it"
