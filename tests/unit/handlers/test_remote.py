"""The phases on the other stage's worker: what they make of answers, good and bad."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.day_one import opened
from tests.support.handling import collect, expected_tokens, raw_request, request, tokens_of, until
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.stage_client import FakeContext, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.hard_edges import PESSIMISTIC
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    OverloadedError,
    PeerUnavailableError,
    RequestCancelledError,
)
from trtllm_disagg.handlers.cancellation import when_stopped
from trtllm_disagg.handlers.chain import Chain
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.idle_timeout import StreamTimeouts
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.recall import Notices
from trtllm_disagg.handlers.remote import RemoteDecode, RemoteDrain, RemotePrefill
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import (
    Generate,
    GenerateRequest,
    Handoff,
    PrefillResult,
    PromptTokensDetails,
    RequestContext,
    TokenChunk,
    Usage,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

PARAMS = {
    "request_type": "context_only",
    "opaque_state": "eA==",
    "ctx_request_id": 5,
    "first_gen_tokens": [7],
}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 1,
    "total_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
}
PREFILLED = {
    "token_ids": [7],
    "finish_reason": "length",
    "log_probs": [-0.5],
    "completion_usage": USAGE,
    "disaggregated_params": PARAMS,
}
WITHOUT_TOKEN = PREFILLED | {"disaggregated_params": PARAMS | {"first_gen_tokens": None}}
BOTH_DIRECTIONS = {
    "do_remote_decode": True,
    "do_remote_prefill": True,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
WHOLE = {"token_ids": [], "finish_reason": "stop", "completion_usage": USAGE}
GOING_ON: dict[str, Any] = {"token_ids": [8]}
END = {"token_ids": [9], "finish_reason": "length", "completion_usage": USAGE}


class Prefill:
    """A RemotePrefill on a script, and the requests that it has drained."""

    def __init__(self, *answers: Any, error: DisaggError | None = None) -> None:
        self.client = RecordingStageClient(answers=answers, error=error)
        self.drained: list[GenerateRequest] = []
        config = WorkerConfig(model="m", role=Role.DECODE)
        self.phase = RemotePrefill(peers_of(config, self.client), self.drained.append, Notices(None))

    async def __call__(self, context: FakeContext | None = None) -> Handoff:
        return await self.phase(request(), context or FakeContext())


# -- prefill


async def test_remote_prefill_answer_becomes_a_handoff_that_is_drained_once() -> None:
    prefill = Prefill(PREFILLED)
    handoff = await prefill()
    usage = Usage.of(3, 1, 2)
    assert handoff.first == TokenChunk([7], log_probs=[-0.5], completion_usage=usage)
    assert handoff.result == PrefillResult(PARAMS, PromptTokensDetails(2))
    (asked,) = prefill.client.requests
    assert asked.pop("phase_request").pop("phase") == "prefill"
    del asked["errand"]  # of 0.2
    assert asked == raw_request()
    assert prefill.drained == []
    handoff.release()
    handoff.release()
    (drained,) = prefill.drained
    assert drained.prefill_result == handoff.result


async def test_an_answer_without_a_handoff_is_final() -> None:
    handoff = await Prefill(WHOLE)()
    assert handoff.is_final
    assert handoff.first.finish_reason == "stop"


@pytest.mark.parametrize(
    ("answers", "message", "drains"),
    [
        ([], "ended too early", 0),
        ([WHOLE, WHOLE], "2 answers", 0),
        ([PREFILLED, PREFILLED], "2 answers", 2),
        ([PREFILLED, GOING_ON], "no finish reason and no handoff", 1),
        ([GOING_ON], "no finish reason and no handoff", 0),
        ([{"token_ids": "x"}], "unreadable answer", 0),
        ([{}], "unreadable answer", 0),
        (["x"], "unreadable answer", 0),
        ([PREFILLED, None], "unreadable answer", 1),
        ([{"token_ids": [], "disaggregated_params": PARAMS}], "0 tokens", 0),
        ([{"token_ids": [7], "kv_transfer_params": BOTH_DIRECTIONS}], "unreadable handoff", 0),
        ([{"token_ids": [7], "kv_transfer_params": {}}], "unreadable handoff", 0),
        ([PREFILLED | {"disaggregated_params": PARAMS | {"opaque_state": 5}}], "opaque_state", 0),
        ([PREFILLED | {"disaggregated_params": {}}], "names no sender", 0),
        ([WITHOUT_TOKEN], "unreadable handoff: .* first_gen_tokens has no token", 0),
    ],
)
async def test_invalid_prefill_answer_raises_peer_unavailable_and_drains_its_kv(
    answers: list[Any], message: str, drains: int
) -> None:
    prefill = Prefill(*answers)
    with pytest.raises(PeerUnavailableError, match=message) as error:
        await prefill()
    assert error.value.peer == prefill.client.instance_id
    assert len(prefill.drained) == drains


async def test_handoff_without_a_token_is_its_prefill_workers_fault_and_decode_answers_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill = RecordingStageClient(answers=[WITHOUT_TOKEN])
    config = WorkerConfig(model="m", role=Role.DECODE, strategy="decode_first", max_tries=1)
    with mounted_recording_llm(PESSIMISTIC):
        answer = build_generate(config, opened(), prefill)
        assert tokens_of(await collect(answer, request())) == expected_tokens(5)
    assert "at instance 1 (the prefill worker sent an unreadable handoff" in caplog.text


async def test_error_after_the_prefill_answer_drains_its_kv() -> None:
    prefill = Prefill(PREFILLED, error=PeerUnavailableError("died"))
    with pytest.raises(PeerUnavailableError, match="died"):
        await prefill()
    assert len(prefill.drained) == 1


@pytest.mark.parametrize("before", [True, False])
async def test_a_client_that_leaves_before_the_answer_is_there_cancels_the_prefill(before: bool) -> None:
    """Prefill has let its KV go then, so a decode would fail, and no client waits for it."""
    context = FakeContext()

    async def serve(request: GenerateRequest, context_there: RequestContext) -> Any:
        yield TokenChunk([7], disaggregated_params=PARAMS)
        context.stop()

    if before:
        context.stop()
    drained: list[GenerateRequest] = []
    peers = peers_of(WorkerConfig(model="m", role=Role.DECODE), RecordingStageClient(serve))
    with pytest.raises(RequestCancelledError):
        await RemotePrefill(peers, drained.append, Notices(None))(request(), context)
    assert before or len(drained) == 1


def guarded(client: RecordingStageClient, timeouts: StreamTimeouts) -> Peers:
    return Peers(client, CircuitBreaker(limit=3, seconds=5.0), {"decode": timeouts})


async def test_a_drain_that_hangs_ends_with_the_time_for_a_first_token() -> None:
    async def hang(request: GenerateRequest, context: RequestContext) -> Any:
        left = asyncio.Event()
        with when_stopped(context, left.set):
            await left.wait()
        for chunk in list[TokenChunk]():
            yield chunk

    decode = RecordingStageClient(hang)
    RemoteDrain(guarded(decode, StreamTimeouts(first=0.01, next=60.0)))(request())
    await until(lambda: decode.calls and not num_in_background())
    await decode.idle()


class DecodesOfRouter(RecordingStageClient):
    """`skipped` has, for each drain, the instances that the circuit breaker skips."""

    def __init__(self) -> None:
        super().__init__(error=PeerUnavailableError("gone"))
        self.skipped: list[frozenset[int]] = []

    async def pick(self, request: GenerateRequest) -> RecordingStageClient:
        self.skipped.append(request.skipped)
        return await super().pick(request)


async def test_drains_under_router_skip_a_decode_worker_that_fails_them() -> None:
    decode, config = DecodesOfRouter(), WorkerConfig(model="m", role=Role.PREFILL, strategy="router")
    with mounted_recording_llm(PESSIMISTIC):
        prefill = build_generate(config, opened(), decode)
        for _ in range(config.breaker_failures + 1):
            context = FakeContext()
            async for _ in prefill(request(), context):
                context.stop()
            await until(lambda: not num_in_background())
    assert decode.skipped == [*[frozenset()] * config.breaker_failures, {decode.instance_id}]


# -- decode


def decode_with(client: RecordingStageClient, releases: list[int]) -> Generate:
    async def prefill(request: GenerateRequest, context: RequestContext) -> Handoff:
        result = PrefillResult(PARAMS)
        return Handoff(TokenChunk([7]), result, on_release=lambda handoff: releases.append(1))

    return Chain(prefill, RemoteDecode(guarded(client, StreamTimeouts(first=60.0, next=60.0))))


async def test_decode_gets_the_request_and_the_prefill_result() -> None:
    client = RecordingStageClient(answers=[GOING_ON, END])
    chunks = await collect(decode_with(client, []), request())
    assert [chunk.token_ids for chunk in chunks] == [[7], [8], [9]]
    sent = {"prefill_result": {"disaggregated_params": PARAMS}, "phase_request": {"phase": "decode"}}
    (asked,) = client.requests
    del asked["errand"]  # of 0.2
    assert asked == raw_request() | sent


@pytest.mark.parametrize(
    ("answers", "error", "kind", "releases"),
    [
        ([], None, PeerUnavailableError, 1),
        ([], EngineError("x"), EngineError, 1),
        ([], OverloadedError("x"), OverloadedError, 1),
        ([GOING_ON], None, PeerUnavailableError, 0),
        ([GOING_ON], EngineError("x"), EngineError, 0),
        ([END], EngineError("x"), EngineError, 0),
        ([{"token_ids": None}], None, PeerUnavailableError, 0),
        ([GOING_ON, 5], None, PeerUnavailableError, 0),
    ],
)
async def test_kv_is_released_until_decode_has_answered(
    answers: list[Any], error: DisaggError | None, kind: type[DisaggError], releases: int
) -> None:
    client = RecordingStageClient(answers=answers, error=error)
    released: list[int] = []
    with pytest.raises(DisaggError) as caught:
        await collect(decode_with(client, released), request())
    assert type(caught.value) is kind
    assert caught.value.peer == client.instance_id
    assert len(released) == releases


async def test_a_client_that_left_is_no_error() -> None:
    client = RecordingStageClient(answers=[GOING_ON, GOING_ON, END])
    context, released = FakeContext(), [0]
    chunks = decode_with(client, released)(request(), context)
    assert [await anext(chunks), await anext(chunks)] == [TokenChunk([7]), TokenChunk([8])]
    context.stop()
    assert [chunk async for chunk in chunks] == []
    assert released == [0]


async def test_leaving_a_remote_decode_stops_the_peer() -> None:
    running = asyncio.Event()
    stopped: list[bool] = []

    async def serve(request: GenerateRequest, context: RequestContext) -> Any:
        yield TokenChunk([8])
        running.set()
        stop = asyncio.Event()
        with when_stopped(context, stop.set):
            await stop.wait()
        stopped.append(context.is_stopped())
        yield TokenChunk([9])

    client = RecordingStageClient(serve)
    chunks = decode_with(client, [])(request(), FakeContext())
    await anext(chunks)
    await anext(chunks)
    await running.wait()
    await chunks.aclose()
    await client.idle()
    assert stopped == [True]
