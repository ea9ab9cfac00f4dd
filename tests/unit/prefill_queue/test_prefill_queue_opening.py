"""Which worker opens which prefill queue, what it says when it cannot, and what is pushed past it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import until
from tests.support.nats_server import nats_server
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.errors import ConfigError, QueueUnusableError, StageTimeoutError
from trtllm_disagg.prefill_queue import nats_queue, open_prefill_queue
from trtllm_disagg.prefill_queue.broker import Broker, NatsClient, QueueLimits, preserve_cancellation
from trtllm_disagg.prefill_queue.messages import Answer, Beat, Claim, Failed, FromPuller, Item, Names
from trtllm_disagg.prefill_queue.nats_queue import DepthWatch, NatsPrefillQueue, Room
from trtllm_disagg.prefill_queue.queue_client import Pushed
from trtllm_disagg.strategies import switchable
from trtllm_disagg.tools.up.brokers import nats_config_argv, nats_url, new_nats_password
from trtllm_disagg.tools.up.plan import LOOPBACK
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk


async def test_worker_without_queue_dispatch_opens_no_prefill_queue() -> None:
    config = WorkerConfig(model="m", role=Role.PREFILL)
    assert (await open_prefill_queue(config, "kind")).client is None
    assert (await open_prefill_queue(WorkerConfig(model="m"), "kind")).client is None


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
    assert {Names.of(config, "kind").items for config in configs} == {
        f"trtllm_disagg.prefill_queue.dynamo.{component or 'prefill'}.generate.kind.items"
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
    """Its port is open to every user of the host: all of them could read the prompts there, and answer them."""
    password = new_nats_password()
    with nats_server(tmp_path, flags=nats_config_argv(), env=password) as server:
        limits = QueueLimits(connect=5.0)
        url = nats_url(LOOPBACK, server.port, password)
        config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue", nats_server=url)
        for wrong in (server.url, nats_url(LOOPBACK, server.port, new_nats_password())):
            with pytest.raises(ConfigError, match="Authorization Violation"):
                await open_prefill_queue(replace(config, nats_server=wrong), "kind", limits)
        await (await open_prefill_queue(config, "kind", limits)).aclose()


async def test_tls_url_connects_only_to_a_server_with_tls(
    tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that offers none gets neither a password nor a prompt."""
    limits = QueueLimits(connect=2.0)
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


async def test_a_worker_that_has_left_before_it_starts_pulls_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_queue, "expose", lambda *_: None)
    config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue")
    broker = Broker(Names.of(config, "kind"), QueueLimits(), NatsClient())
    queue = NatsPrefillQueue(config, broker)
    await queue.leave()
    await queue.start(unused, 1, object())
    async with asyncio.timeout(30):
        await queue.drained()


async def unused(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    yield TokenChunk([])


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
    monkeypatch.setattr(nats_queue, "Broker", BreaksAtOnce)
    config = WorkerConfig(model="m", role=Role.PREFILL, prefill_dispatch="queue")
    with pytest.raises(QueueUnusableError, match="NATS is gone"):
        await open_prefill_queue(config, "kind")
    assert len(BreaksAtOnce.closed) == 1


# -- pushed items


ID = uuid.uuid4().hex
#: A silent worker is lost after the queue timeout alone.
LIMITS = QueueLimits(claims=3, beat=0.0)


def item() -> Item:
    return Item(ID, ID, None, [], {})


def claim(attempt: int) -> Claim:
    return Claim(ID, attempt, 100 + attempt)


ATTEMPTS = st.integers(1, 5)
SAID = st.one_of(
    ATTEMPTS.map(claim),
    ATTEMPTS.map(lambda attempt: Beat(ID, attempt)),
    ATTEMPTS.map(lambda attempt: Answer(ID, attempt, {"attempt": attempt})),
    ATTEMPTS.map(lambda attempt: Failed(ID, attempt, "Internal", "broken")),
)


async def what_happens(said: list[FromPuller], takes: bool) -> None:
    replies: dict[int, list[bool]] = {}
    claims: list[Claim] = []
    pushed = Pushed(item(), 60.0, claims.append, LIMITS)
    for place, word in enumerate(said):
        replies[place] = []
        pushed.receive(word, replies[place].append)
    has_answer = pushed.outcome.done() and pushed.outcome.exception() is None
    if has_answer and takes:
        assert pushed.take() == {"attempt": claims[-1].attempt}
    pushed.close()

    granted = [said[place] for place, answers in replies.items() if True in answers]
    assert [word for word in granted if isinstance(word, Claim)] == claims
    assert len(claims) <= LIMITS.claims
    attempts = [each.attempt for each in claims]
    assert attempts == sorted(set(attempts)), "an older attempt never comes back"
    taken = [word for word in granted if isinstance(word, Answer)]
    assert len(taken) == (has_answer and takes)
    for place, word in enumerate(said):
        if isinstance(word, Claim | Answer):
            assert len(replies[place]) == 1, "each question has one answer"
        elif isinstance(word, Failed):
            assert True not in replies[place]


@given(said=st.lists(SAID, max_size=12), takes=st.booleans())
def test_pushed_item_takes_one_answer_and_replies_to_every_message(
    said: list[FromPuller], takes: bool
) -> None:
    asyncio.run(what_happens(said, takes))


async def test_silent_worker_times_out_and_beats_extend_the_timeout() -> None:
    pushed = Pushed(item(), 0.5, lambda claim: None, LIMITS)
    pushed.receive(claim(1), lambda yes: None)
    for _ in range(6):
        await asyncio.sleep(0.1)
        pushed.receive(Beat(ID, 1), lambda yes: None)
    assert not pushed.outcome.done()
    with pytest.raises(StageTimeoutError, match="the prefill worker 65 has fallen silent") as raised:
        await pushed.outcome
    assert raised.value.peer == 101
    pushed.close()


async def test_a_prefill_that_runs_gets_the_time_of_some_beats_however_short_the_queue_timeout_is() -> None:
    timeout, silence = 0.01, 60.0
    pushed = Pushed(item(), timeout, lambda claim: None, QueueLimits(beat=silence))
    pushed.receive(claim(1), lambda yes: None)
    await asyncio.sleep(2 * timeout)
    pushed.receive(Answer(ID, 1, {"attempt": 1}), lambda yes: None)
    assert pushed.take() == {"attempt": 1}
    pushed.close()


async def test_room_is_counted_in_items_and_tokens_and_there_again_when_an_item_leaves() -> None:
    room = Room(max_items=2, max_tokens=100)
    room.enter("long", 5000)
    assert not room.is_there
    waiting = asyncio.create_task(room.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    room.leave("long")
    await waiting
    room.enter("a", 1)
    await room.wait()
    room.enter("b", 1)
    assert [room.is_there] == [False]


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


class BrokenOnce:
    """A broker that answers first with an error that no layer foresees."""

    def __init__(self) -> None:
        self.asked = 0

    async def wait_until_usable(self) -> None:
        """It is."""

    async def waiting(self) -> tuple[int, int]:
        self.asked += 1
        if self.asked == 1:
            raise KeyError("num_pending")
        return 3, 7

    async def pushed_at(self, place: int) -> float | None:
        return None

    is_usable = True


async def test_the_depth_is_watched_on_after_an_unforeseen_error(caplog: pytest.LogCaptureFixture) -> None:
    broker = BrokenOnce()
    watch = DepthWatch(broker, list)  # type: ignore[arg-type]
    await watch.start()
    await until(lambda: watch.depth() == 3)
    await watch.stop()
    assert "looking at the prefill queue failed" in caplog.text
