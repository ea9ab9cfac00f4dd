"""The endpoints of a worker, and its entries in discovery, where Dynamo fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dynamo.common import model_taints

from tests.support.handling import until
from tests.support.listed import MODEL, Listed
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.dynamo_runtime import cards, registration
from trtllm_disagg.dynamo_runtime.system_port import require_system_port
from trtllm_disagg.errors import ConfigError, PeerUnavailableError
from trtllm_disagg.tools.up.ports import free_system_ports
from trtllm_disagg.types import GenerateRequest, RequestContext, TokenChunk


class Endpoint:
    """Keeps the calls that change discovery. `fails`: the next one raises. `cannot_be_served`: so does serving."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self.is_served = self.fails = self.cannot_be_served = False
        self.calls: list[str] = []
        self.labels: list[tuple[str, str]] = []
        self.cards: list[Any] = []

    async def serve_endpoint(
        self, handler: object, *, metrics_labels: list[tuple[str, str]], **_: Any
    ) -> None:
        if self.cannot_be_served:
            raise ConnectionError("read-only file system")
        self.is_served = True
        self.labels = metrics_labels
        await self.ended

    async def register_endpoint_instance(self) -> None:
        self._change("register")

    async def unregister_endpoint_instance(self) -> None:
        self._change("unregister")

    def _change(self, call: str) -> None:
        if self.fails:
            self.fails = False
            raise ConnectionError("reset")
        self.calls.append(call)


async def unused(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
    yield TokenChunk([1])


@asynccontextmanager
async def at_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Listed, Endpoint, asyncio.Task[None]]]:
    """A worker that is not yet at the frontends' endpoint, and that endpoint."""

    async def nothing(*_: object, **__: object) -> None: ...

    async def keep(*_: object, runtime_config: Any, **__: object) -> None:
        for _turn in range(3):  # turns of the loop, in which a failed endpoint is noticed
            await asyncio.sleep(0)
        front.cards.append(runtime_config)

    monkeypatch.setattr(cards, "register_model", keep)
    monkeypatch.setattr(cards, "unregister_model", nothing)
    monkeypatch.setattr(registration, "get_grace_period_seconds", lambda: 0)
    config = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first", discovery_backend="mem")
    worker = Listed(config)
    own, front = Endpoint(), Endpoint()
    worker.runtime.own |= {config.worker_endpoint_id: own, config.frontend_endpoint_id: front}
    serving = asyncio.create_task(worker.serve(unused))
    try:
        await until(lambda: own.is_served)
        yield worker, front, serving
    finally:
        for each in (own, front):
            if not each.ended.done():
                each.ended.set_result(None)
        await asyncio.wait({serving})
        worker.runtime.shutdown()


@asynccontextmanager
async def at_frontends(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Listed, Endpoint, asyncio.Task[None]]]:
    """A worker that came to the frontends' endpoint later than to its own."""
    async with at_its_own(monkeypatch) as (worker, front, serving):
        await worker.registration.enter()
        await until(lambda: front.is_served)
        yield worker, front, serving


async def test_metrics_have_both_names_of_the_models_label_and_the_card_the_limit_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frontend refuses a prompt that fills the context."""
    async with at_frontends(monkeypatch) as (_, front, _):
        assert front.labels == [("model", "m"), ("model_name", "m")]
        [card] = front.cards
        assert card.context_length == MODEL.max_seq_len
        assert json.loads(card.runtime_data["token_budget"]) == {
            "combined_limit": MODEL.max_seq_len,
            "reject_prompt_overflow": True,
            "reject_total_overflow": False,
        }


async def test_an_entry_that_failed_to_go_or_to_come_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with at_frontends(monkeypatch) as (worker, front, _):
        front.fails = True
        with pytest.raises(ConnectionError):
            await worker.registration.leave()
        assert worker.registration.place is registration.Place.LEAVING
        await worker.registration.leave()
        assert front.calls == ["unregister"]
        front.fails = True
        with pytest.raises(ConnectionError):
            await worker.registration.enter()
        await worker.registration.enter()
        assert front.calls == ["unregister", "register"]


async def test_a_later_endpoint_that_fails_ends_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    async with at_frontends(monkeypatch) as (_, front, serving):
        front.ended.set_exception(ConnectionError("reset"))
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(5):
                await serving


async def test_a_later_endpoint_that_cannot_be_served_fails_its_entry_and_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A `switch` while discovery cannot be written."""
    async with at_its_own(monkeypatch) as (worker, front, serving):
        front.cannot_be_served = True
        with pytest.raises(ConnectionError, match="read-only"):
            await worker.registration.enter()
        await asyncio.wait({serving}, timeout=0.05)
        assert not serving.done()
        with pytest.raises(PeerUnavailableError, match="before it is restarted; it failed there: read-only"):
            await worker.registration.enter()
        listing, config = worker.registration.listing, worker.config
        assert config.worker_endpoint_id in listing
        assert config.frontend_endpoint_id not in listing


@pytest.mark.parametrize(
    ("entry", "step"),
    [
        ("enter", "register_endpoint_instance"),
        ("renew", "unregister_endpoint_instance"),
        ("renew", "register_endpoint_instance"),
    ],
)
async def test_a_worker_that_leaves_while_it_enters_discovery_is_not_in_it(
    entry: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with at_frontends(monkeypatch) as (worker, front, _):
        if entry == "enter":
            await worker.registration.leave()
        has_come, may_go_on, original = asyncio.Event(), asyncio.Event(), getattr(front, step)

        async def slow() -> None:
            setattr(front, step, original)  # the next call is a fast one
            has_come.set()
            await may_go_on.wait()
            await original()

        monkeypatch.setattr(front, step, slow)
        before = len(front.calls)
        place = worker.registration
        entering = asyncio.create_task(place.listing.renew() if entry == "renew" else place.enter())
        await has_come.wait()
        await place.unlist()
        may_go_on.set()
        await entering
        assert front.calls[-1] == "unregister"
        assert front.calls[before:].count("register") == (step == "register_endpoint_instance")


async def test_a_worker_that_has_left_while_it_started_enters_no_discovery() -> None:
    config = WorkerConfig(model="m", role=Role.PREFILL, strategy="prefill_first", discovery_backend="mem")
    worker = Listed(config)
    own = worker.runtime.own[config.worker_endpoint_id] = Endpoint()
    await worker.registration.unlist()
    async with asyncio.timeout(30):
        await worker.serve(unused)
    assert not own.is_served
    worker.runtime.shutdown()


async def test_a_second_stage_removes_its_card_before_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frontend serves no model while one of its cards has no instance."""
    async with at_its_own(monkeypatch) as (worker, _, _):
        own = worker.runtime.endpoint_for_workers
        assert isinstance(own, Endpoint)

        async def remove(endpoint: Endpoint) -> None:
            endpoint.calls.append("remove card")

        monkeypatch.setattr(cards, "unregister_model", remove)
        await worker.cards.put_for_peers()
        await worker.registration.unlist()
        assert own.calls == ["remove card", "unregister"]


async def test_a_card_that_is_put_while_its_worker_leaves_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with at_its_own(monkeypatch) as (worker, _, _):
        removed: list[object] = []

        async def remove(endpoint: Endpoint) -> None:
            removed.append(endpoint)

        monkeypatch.setattr(cards, "unregister_model", remove)
        putting = asyncio.create_task(worker.cards.put_for_peers())
        await asyncio.sleep(0)
        await worker.registration.unlist()
        await putting
        assert removed[-1] is worker.runtime.endpoint_for_workers


class KeepsRoutes:
    """In place of Dynamo's runtime and of its endpoints: keeps what they would serve at the system port."""

    def __init__(self) -> None:
        self.routes: dict[str, Any] = {}

    def endpoint(self, name: str) -> KeepsRoutes:
        return KeepsRoutes()

    async def client(self) -> KeepsRoutes:
        return self

    def connection_id(self) -> int:
        return 1

    def register_engine_route(self, path: str, route: Any) -> None:
        self.routes[path] = route

    async def serve_endpoint(self, *_: object, **__: object) -> None: ...

    async def register_endpoint_instance(self) -> None: ...

    async def unregister_endpoint_instance(self) -> None: ...


async def test_taints_reach_the_card_and_the_next_card(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    updates: list[set[str]] = []

    async def register(*_: object, runtime_config: Any, **__: object) -> None:
        put.append(runtime_config)

    async def remove(*_: object) -> None: ...

    async def update(_: object, taints: set[str]) -> None:
        updates.append(taints)

    monkeypatch.setattr(cards, "register_model", register)
    monkeypatch.setattr(cards, "unregister_model", remove)
    monkeypatch.setattr(registration, "get_grace_period_seconds", lambda: 0)
    monkeypatch.setattr(model_taints, "update_model_taints", update)
    dynamo = KeepsRoutes()
    config = WorkerConfig(model="m", role=Role.DECODE, strategy="decode_first")
    worker = Listed(config, dynamo=dynamo)
    await worker.registration.enter()
    assert not put[-1].taints
    answer = await dynamo.routes["update/model_taints"]({"taints": ["slow", "slow", "old"]})
    assert answer == {"status": "ok", "taints": ["old", "slow"]}
    assert updates == [{"old", "slow"}]
    # A switch makes the card anew.
    await worker.registration.leave()
    await worker.registration.enter()
    assert put[-1].taints == {"old", "slow"}
    await worker.cards.put_for_peers()
    assert not put[-1].taints


# -- no worker starts without a reachable /metrics and /health


HOST = "127.0.0.1"


def wanting(port: str) -> None:
    require_system_port({"DYN_SYSTEM_PORT": port, "DYN_SYSTEM_HOST": HOST})


def test_a_taken_port_is_named_and_free_again_later() -> None:
    (free,) = free_system_ports(1)
    port = str(free)
    refused = rf"DYN_SYSTEM_PORT: '{port}' is not allowed; expected a port on {HOST}"
    with socket.create_server((HOST, free)), pytest.raises(ConfigError, match=refused):
        wanting(port)
    wanting(port)
    wanting(port)


@pytest.mark.parametrize("port", ["", "-1", "0", "70000", "32768", "http"])
def test_a_port_that_dynamo_cannot_read_is_refused_by_the_name_of_its_variable(port: str) -> None:
    if port in ("", "-1", "0"):
        wanting(port)
    else:
        with pytest.raises(ConfigError, match=f"DYN_SYSTEM_PORT: '{port}' .*32767"):
            wanting(port)


@pytest.mark.parametrize("host", ["\N{LATIN SMALL LETTER E WITH ACUTE}" * 70, "127.0.0.1\0"])
def test_a_host_that_no_name_can_be_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"DYN_SYSTEM_HOST: .* is not allowed; expected an address"):
        require_system_port({"DYN_SYSTEM_PORT": "1", "DYN_SYSTEM_HOST": host})
