"""Schedule style generation_first: both phases at once, through real embedded engines, and with phases that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.engine_pair import PROMPT, both_idle, open_engines, two_stages
from tests.support.handling import ORDERS, collect, request, tokens_of
from tests.support.recording_pair import MAX_SEQ_LEN, recording_engine
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.errors import (
    ConfigError,
    DisaggError,
    HandoffRefusedError,
    InvalidRequestError,
    KvTransferError,
    PeerUnavailableError,
    RequestCancelledError,
)
from trtllm_disagg.handlers.concurrent import Concurrent, LocalPush, Opened, RemotePush
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import Generate, GenerateRequest, Handoff, Rendezvous, RequestContext, TokenChunk

# -- with engines


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> Iterator[dict[Role, Engine]]:
    with open_engines(checkpoints()) as started:
        yield started


def pair(engines: dict[Role, Engine], order: str) -> tuple[Generate, RecordingStageClient]:
    return two_stages(engines, order, schedule_style=ScheduleStyle.GENERATION_FIRST)


def asked(max_tokens: int = 8, **keys: Any) -> GenerateRequest:
    options = {"temperature": 0.0}
    return request(max_tokens, token_ids=PROMPT, sampling_options=options, **keys)


@pytest.mark.parametrize(
    ("order", "max_tokens", "fact"),
    [
        ("prefill_first", 8, "decode_instance"),
        ("decode_first", 8, "prefill_instance"),
        ("decode_first", 1, "prefill_instance"),
    ],
)
async def test_the_answer_is_that_of_one_worker_and_the_trace_names_the_other(
    engines: dict[Role, Engine], order: str, max_tokens: int, fact: str
) -> None:
    both = build_generate(
        WorkerConfig(model="m", role=Role.AGG), engines[Role.PREFILL], RecordingStageClient()
    )
    whole = await collect(both, asked(max_tokens))
    generate, client = pair(engines, order)
    met = await collect(generate, answered := asked(max_tokens))
    assert tokens_of(met) == tokens_of(whole)
    assert met[-1].finish_reason == whole[-1].finish_reason == "length"
    (other,) = client.instance_ids()
    assert answered.trace.facts[fact] == f"{other:x}"
    await client.idle()
    await both_idle(engines)


@pytest.mark.parametrize("moment", ["at once", "after a token"])
@pytest.mark.parametrize("order", ORDERS)
async def test_client_that_leaves_frees_blocks_on_both_engines(
    engines: dict[Role, Engine], order: str, moment: str
) -> None:
    generate, client = pair(engines, order)
    context = FakeContext()
    chunks = generate(asked(300, annotations=["x"]), context)
    if moment == "after a token":
        await anext(chunks)
    else:
        asyncio.get_running_loop().call_soon(context.stop)
        async for _ in chunks:
            """Nothing, or what was quicker."""
    context.stop()
    await chunks.aclose()
    await client.idle()
    await both_idle(engines)


async def test_a_prefill_that_is_refused_ends_the_wait_of_decode(engines: dict[Role, Engine]) -> None:
    """Long before decode's own deadline, and with prefill's reason."""
    generate, client = pair(engines, "decode_first")

    async def refuse(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        if request.token_ids:
            raise InvalidRequestError("not here")
        yield TokenChunk([])

    client.serve_by(refuse)
    with pytest.raises(InvalidRequestError, match="not here"):
        await asyncio.wait_for(collect(generate, asked()), 30)
    await both_idle(engines)


# -- with scripts


def decode_peers(description: dict[str, Any]) -> Peers:
    """Of a decode worker: a prefill worker with this description."""
    config = WorkerConfig(model="m", role=Role.DECODE)
    return peers_of(config, RecordingStageClient(description=description))


class ScriptedPush:
    """A prefill phase that does what it is told."""

    def __init__(self, error: DisaggError | None = None) -> None:
        self.error = error
        self.ended = asyncio.Event()
        self.met: list[Rendezvous | None] = []
        self.lost_senders: list[int] = []

    async def open_rendezvous(self, request: GenerateRequest) -> Opened:
        return Opened(Rendezvous(5, ["tcp://here:1"]), self._run, 7, lambda: self.lost_senders.append(7))

    async def _run(self, request: GenerateRequest, context: RequestContext) -> None:
        self.met.append(request.rendezvous)
        try:
            if self.error is not None:
                raise self.error
            await asyncio.sleep(3600)
        finally:
            self.ended.set()


async def two_tokens(
    request: GenerateRequest, context: RequestContext, handoff: Handoff
) -> AsyncGenerator[TokenChunk, None]:
    assert request.rendezvous == Rendezvous(5, ["tcp://here:1"])
    yield TokenChunk([1])
    yield TokenChunk([2], finish_reason="length")


@pytest.mark.parametrize("kind", [KvTransferError, HandoffRefusedError])
async def test_a_decode_that_fails_ends_the_push(kind: type[DisaggError]) -> None:
    push = ScriptedPush()

    async def fail(
        request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        await asyncio.sleep(0)
        if request.token_ids:
            raise kind("lost")
        yield TokenChunk([])

    with pytest.raises(KvTransferError, match="lost") as error:
        await collect(Concurrent(push.open_rendezvous, fail), request())
    assert push.ended.is_set()
    assert (error.value.peer, push.lost_senders) == (7, [7]), "the sender of the KV"


async def test_a_push_that_fails_closes_decode() -> None:
    closed = asyncio.Event()

    async def wait(
        request: GenerateRequest, context: RequestContext, handoff: Handoff
    ) -> AsyncGenerator[TokenChunk, None]:
        try:
            await asyncio.sleep(3600)
            yield TokenChunk([])
        finally:
            closed.set()

    push = ScriptedPush(RequestCancelledError("given up"))
    with pytest.raises(RequestCancelledError, match="given up"):
        await collect(Concurrent(push.open_rendezvous, wait), request())
    assert closed.is_set()


def test_an_unreachable_engine_is_refused_before_it_serves() -> None:
    with pytest.raises(ConfigError, match="this engine has no ctx_info_endpoint"):
        LocalPush(recording_engine())


@pytest.mark.parametrize(
    "description", [{}, {"ctx_info_endpoint": 5}, {"ctx_info_endpoint": "tcp://a:1", "ctx_dp_rank": 2**31}]
)
async def test_prefill_worker_that_cannot_be_met_raises_peer_unavailable(description: dict[str, Any]) -> None:
    push = RemotePush(decode_peers(description), recording_engine())
    with pytest.raises(PeerUnavailableError, match="ctx_") as error:
        await push.open_rendezvous(request())
    assert error.value.peer == 1


async def test_a_prompt_that_is_too_long_is_refused_before_a_stage_is_asked() -> None:
    cannot_be_met = RemotePush(decode_peers({}), recording_engine())
    with pytest.raises(InvalidRequestError, match="leaves room"):
        await collect(
            Concurrent(cannot_be_met.open_rendezvous, two_tokens), request(token_ids=[1] * MAX_SEQ_LEN)
        )


@pytest.mark.parametrize(("role", "strategy"), [(Role.AGG, "decode_first"), (Role.DECODE, "router")])
def test_generation_first_is_refused_for_roles_and_strategies_without_dispatch(
    role: Role, strategy: str
) -> None:
    with pytest.raises(ConfigError, match="--schedule-style: 'generation_first'"):
        WorkerConfig(model="m", role=role, strategy=strategy, schedule_style=ScheduleStyle.GENERATION_FIRST)
