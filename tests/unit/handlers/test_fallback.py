"""Fallback: an answer goes on with the next token whichever worker fails when, and the trace has each failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.day_one import PESSIMISM, Both
from tests.support.handling import ORDERS, PROMPT, collect, expected_tokens, request, tokens_of
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.recording_pair import Pair, make_pair, recording_engine
from tests.support.stage_client import FakeContext, Instances
from tests.support.trying import trying
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engines.recording.hard_edges import GENERATION_TRANSFER_ERROR, PESSIMISTIC
from trtllm_disagg.engines.recording.llm import LLM, RequestError, Script
from trtllm_disagg.engines.recording.result import scripted_token
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    HandoffRefusedError,
    InvalidRequestError,
    KvTransferError,
    NoInstanceError,
    OverloadedError,
    PeerUnavailableError,
    RequestCancelledError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.attempts import Attempt
from trtllm_disagg.handlers.delivered import Replays, always_replay, replay_if_needed
from trtllm_disagg.handlers.selection import BestCached, InFlight, Selection
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import Generate, GenerateRequest, PhaseRequest, RequestContext, TokenChunk, Usage

pytestmark = pytest.mark.usefixtures("no_leaks")

Seen = list[GenerateRequest]
MakeError = Callable[[], DisaggError]


def way(
    seen: Seen, fails_after: int | None = None, error: Callable[[], DisaggError] = PeerUnavailableError
) -> Generate:
    """Answers as the model does, and fails after so many tokens of its own."""

    async def generate(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        seen.append(request)
        count = request.stop.max_tokens or 1
        for position in range(count):
            if position == fails_after:
                raise error()
            is_last = position == count - 1
            yield TokenChunk(
                [scripted_token(request.token_ids, position)],
                finish_reason="length" if is_last else None,
                completion_usage=Usage.of(len(request.token_ids), count, 0) if is_last else None,
            )
        if fails_after == count:
            raise error()

    return generate


def failing(error: DisaggError) -> MakeError:
    return lambda: error


def of_peer(error: DisaggError, peer: int) -> DisaggError:
    error.peer = peer
    return error


@given(
    st.lists(st.integers(0, 6), max_size=4),
    st.sampled_from([{}, {"guided_decoding": {"regex": "a*"}}]),
    st.sampled_from([always_replay, replay_if_needed]),
)
def test_each_token_is_sent_once_wherever_fallback_steps_fail(
    failures: list[int], sampling: dict[str, Any], replays: Replays
) -> None:
    """Appended or replayed."""
    seen: Seen = []
    ways = [Attempt("other_instance", way(seen, after)) for after in failures]
    whole = request(7, sampling_options=sampling)
    chunks = asyncio.run(collect(trying([*ways, Attempt("local", way(seen))], replays), whole))
    assert tokens_of(chunks) == expected_tokens(7)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    usage = chunks[-1].completion_usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)


async def test_logprobs_of_the_prompt_have_none_of_delivered_tokens() -> None:
    async def rest(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        entries = [{str(token): {"logprob": 0.0}} for token in request.token_ids]
        yield TokenChunk(
            expected_tokens(4)[2:],
            finish_reason="length",
            completion_usage=Usage.of(len(request.token_ids), 2, 0),
            engine_data={"prompt_logprobs": entries},
        )

    steps = [Attempt("a", way([], 2)), Attempt("b", rest)]
    chunks = await collect(trying(steps), request(4))
    assert chunks[-1].of_prompt == {"prompt_logprobs": [{str(token): {"logprob": 0.0}} for token in PROMPT]}


async def test_an_answer_with_a_limit_of_thinking_is_appended_with_that_limit() -> None:
    """TensorRT-LLM counts thinking from its start tag on, so delivered tokens count where they are appended."""
    seen: Seen = []
    thinking = request(5, stop_conditions={"max_tokens": 5, "max_thinking_tokens": 3})
    await collect(trying([Attempt("a", way(seen, 2)), Attempt("b", way(seen))]), thinking)
    assert [each.token_ids for each in seen] == [PROMPT, [*PROMPT, *expected_tokens(2)]]
    assert [each.stop.max_thinking_tokens for each in seen] == [3, 3]


async def test_failure_after_the_last_token_sends_only_the_finish_reason() -> None:
    seen: Seen = []

    async def endless(request: GenerateRequest, context: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(expected_tokens(4))
        raise PeerUnavailableError("gone")

    chunks = await collect(trying([Attempt("a", endless), Attempt("b", way(seen))]), request(4))
    assert tokens_of(chunks) == expected_tokens(4)
    assert (chunks[-1].finish_reason, seen) == ("length", [])


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (PeerUnavailableError("x"), True),
        (KvTransferError("x"), True),
        (StageTimeoutError("x"), True),
        (OverloadedError("x"), True),
        (of_peer(EngineError("x"), 5), True),
        (EngineError("x"), False),
        (InvalidRequestError("x"), False),
        (RequestCancelledError("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("after", [0, 2])
async def test_error_category_decides_whether_the_next_fallback_step_runs(
    error: DisaggError, goes_on: bool, after: int
) -> None:
    seen: Seen = []
    asked = request(5)
    climbing = collect(
        trying([Attempt("a", way(seen, after, failing(error))), Attempt("b", way(seen))]), asked
    )
    if goes_on:
        assert tokens_of(await climbing) == expected_tokens(5)
        assert asked.trace.fallbacks == ["b: x"]
    else:
        with pytest.raises(type(error)):
            await climbing
    assert len(seen) == 1 + goes_on


@pytest.mark.parametrize("peer", [None, 5])
async def test_a_step_that_was_too_slow_on_the_own_engine_is_not_tried_again(peer: int | None) -> None:
    """Another instance may be faster; this worker's engine is not."""
    late = StageTimeoutError("late")
    late.peer = peer
    tries, alone = Seen(), Seen()
    first = Attempt("first", way(tries, 0, failing(late)))
    steps = [first, first._replace(name="other_instance"), Attempt("local", way(alone))]
    await collect(trying(steps), request(5))
    assert (len(tries), len(alone)) == (1 if peer is None else 2, 1)


async def test_other_stage_step_runs_only_when_the_own_engine_is_dead() -> None:
    seen: Seen = []
    died = Attempt("first", way(seen, 2, failing(WorkerLeavingError("engine died"))))
    local = Attempt("local", way(seen), "local")
    other = Attempt("other_stage", way(seen), "decode_first", without_engine=True)
    asked = request(5)
    assert tokens_of(await collect(trying([died, local, other]), asked)) == expected_tokens(5)
    assert len(seen) == 2
    assert asked.trace.fallbacks == ["other_stage: engine died"]
    assert asked.trace.strategy == "decode_first"

    asked = request(5)
    gone = Attempt("first", way(seen, 2))
    assert tokens_of(await collect(trying([gone, local, other]), asked)) == expected_tokens(5)
    assert asked.trace.fallbacks == ["local: "]

    none = Attempt("other_stage", way(seen, 0, failing(NoInstanceError("none"))), without_engine=True)
    with pytest.raises(WorkerLeavingError, match="engine died"):
        await collect(trying([died, none]), request(5))


async def test_the_log_names_each_failed_step_and_the_one_that_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = [way([], 0, failing(OverloadedError("too many run here alone"))) for _ in range(2)]
    steps = [Attempt("first", way([], 2, failing(of_peer(PeerUnavailableError("gone"), 0x1A2B))))]
    asked = request(5)
    asked.trace.chose("decode_first", "default")
    with pytest.raises(OverloadedError):
        await collect(trying([*steps, Attempt("local", full[0]), Attempt("direct", full[1])]), asked)
    steps_said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message.partition(": ")[2] for message in steps_said] == [
        "decode_first failed after 2 tokens at instance 1a2b (gone); trying local",
        "local failed after 2 tokens (too many run here alone); trying direct",
    ]


def with_dead_first_engine(strategy: str, **settings: Any) -> Pair:
    pair = make_pair(strategy, **settings)
    first = pair.prefill if strategy == "prefill_first" else pair.decode
    first.scripts.append(Script(error=RequestError("it died")))
    first.is_healthy = False
    return pair


@pytest.mark.parametrize(
    ("strategy", "settings", "wishes"),
    [
        *((order, {}, {}) for order in ORDERS),
        ("prefill_first", {}, {"annotations": ["disagg:local"]}),
        ("decode_first", {"prefill_decider": "length"}, {}),
    ],
)
async def test_a_dead_first_engine_costs_no_answer(
    strategy: str, settings: dict[str, Any], wishes: dict[str, Any]
) -> None:
    """Its worker relays to the other stage, which answers in the other order, alone if it must."""
    pair = with_dead_first_engine(strategy, **settings)
    asked = request(5, **wishes)
    assert tokens_of(await collect(pair.generate, asked)) == expected_tokens(5)
    assert asked.trace.fallbacks == ["other_stage: it died"]
    await pair.idle()
    LLM.kv_store.clear()


@pytest.mark.parametrize("strategy", ORDERS)
async def test_relayed_request_is_not_relayed_back_when_both_engines_are_dead(strategy: str) -> None:
    pair = with_dead_first_engine(strategy)
    other = "decode_first" if strategy == "prefill_first" else "prefill_first"
    asked = msgspec.structs.replace(request(5), phase_request=PhaseRequest("whole", strategy))
    with pytest.raises(WorkerLeavingError, match="it died"):
        await collect(pair.generate, asked)
    assert not any(call.request["phase_request"].get("strategy") == other for call in pair.client.calls)
    await pair.idle()
    LLM.kv_store.clear()


async def test_an_instance_that_failed_is_avoided_and_the_last_error_raised() -> None:
    seen: Seen = []
    errors = [of_peer(KvTransferError(f"error {i}"), 10 + i) for i in range(3)]
    steps = [Attempt("a", way(seen, i, failing(error))) for i, error in enumerate(errors)]
    with pytest.raises(KvTransferError, match="error 2"):
        await collect(trying(steps), request())
    assert [r.avoid for r in seen] == [frozenset(), {10}, {10, 11}]


async def test_stage_without_instances_is_tried_once() -> None:
    seen: Seen = []
    missing = Attempt("first", way(seen, 0, failing(NoInstanceError("none"))))
    asked = request()
    await collect(trying([missing, missing, missing, Attempt("local", way(seen))]), asked)
    assert len(seen) == 2
    assert asked.trace.fallbacks == ["local: none"]


async def test_no_fallback_step_runs_for_a_client_that_left() -> None:
    seen: Seen = []
    context = FakeContext()

    async def left(request: GenerateRequest, given: RequestContext) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk([1])
        context.stop()
        raise PeerUnavailableError("x")

    with pytest.raises(PeerUnavailableError):
        await collect(trying([Attempt("a", left), Attempt("b", way(seen))]), request(), context)
    assert seen == []


@pytest.mark.parametrize(
    ("sampling", "replays"), [({"guided_decoding": {"regex": "a*"}}, replay_if_needed), ({}, always_replay)]
)
async def test_sampled_answer_keeps_its_seed_on_replay(sampling: dict[str, Any], replays: Replays) -> None:
    seen: Seen = []
    drawn = request(5, sampling_options={"temperature": 1.0, **sampling})
    await collect(trying([Attempt("a", way(seen, 2)), Attempt("b", way(seen))], replays), drawn)
    assert [r.token_ids for r in seen] == [drawn.token_ids] * 2
    seeds = [r.sampling.seed for r in seen]
    assert seeds[0] is not None
    assert seeds == [r.raw["sampling_options"]["seed"] for r in seen] == [seeds[0]] * 2


# -- pairs of workers


@pytest.mark.parametrize("order", ORDERS)
async def test_an_answer_of_this_worker_alone_names_no_instance_that_has_failed(order: str) -> None:
    pair = make_pair(order)
    pair.client.serve_by(way([], 0))
    asked = request(4)
    await collect(pair.generate, asked)
    await pair.idle()
    assert asked.trace.fallbacks[-1].startswith("local: ")
    assert not asked.trace.facts.keys() & {"prefill_instance", "decode_instance"}


#: Another version's handoff, for example, is refused: no client is to blame for two workers that do not fit.
KV_OF_NO_USE = pytest.mark.parametrize("error", [KvTransferError("kv"), HandoffRefusedError("kv")], ids=repr)


@KV_OF_NO_USE
@pytest.mark.parametrize("order", ORDERS)
async def test_kv_lost_after_the_first_token_is_recomputed_locally(order: str, error: DisaggError) -> None:
    """Between the first token, which the client has, and the second one."""
    pair = make_pair(order, max_tries=1)
    pair.decode.scripts.append(Script(error=error))
    asked = request(6)
    assert tokens_of(await collect(pair.generate, asked)) == expected_tokens(6)
    assert asked.trace.fallbacks[-1].startswith("local: ")


async def test_a_request_that_is_too_long_with_its_tokens_is_replayed() -> None:
    """With these its prompt is longer than one step of an engine that does not prefill in chunks."""
    with mounted_recording_llm(PESSIMISTIC):
        both = Both("prefill_first")
        both.engines[Role.DECODE].llm.scripts.append(Script(error=RuntimeError("broken"), error_at=6))
        prompt = list(range(1, PESSIMISM["max_num_tokens"] - 2))
        answer = await collect(both.handlers[Role.PREFILL], request(10, token_ids=prompt))
        assert tokens_of(answer) == [scripted_token(prompt, position) for position in range(10)]
        await both.day_one("prefill_first").quiet()


@pytest.mark.parametrize("order", ORDERS)
async def test_answer_that_fills_the_engine_gets_its_end_when_decode_fails(order: str) -> None:
    """TensorRT-LLM: the prompt and its first token leave no room for another one."""
    with mounted_recording_llm(PESSIMISTIC):
        pair = Both(order, max_seq_len=len(PROMPT) + 1).day_one(order)
        pair.decode.scripts.append(Script(error=RequestError(GENERATION_TRANSFER_ERROR)))
        chunks = await collect(pair.generate, request(None))
        assert tokens_of(chunks) == expected_tokens(1)
        assert chunks[-1].finish_reason == "length"
        await pair.quiet()


@KV_OF_NO_USE
async def test_a_prefill_worker_with_kv_that_does_not_arrive_is_not_called_again(error: DisaggError) -> None:
    """Also if its cache is the best one."""

    async def overlaps(request: GenerateRequest) -> Mapping[int, int]:
        return {1: 3}

    prefills = Instances([make_pair("decode_first").client for _ in range(2)])
    load, engine = InFlight(), recording_engine()
    config = WorkerConfig(model="org/model", role=Role.DECODE, strategy="decode_first")
    stage = peers_of(config, Selection(prefills, BestCached(overlaps, load), "prefill"), in_flight=load)
    engine.llm.scripts.append(Script(error=error))
    asked = request(6)
    assert tokens_of(await collect(build_generate(config, engine, stage), asked)) == expected_tokens(6)
    calls = [
        [each["phase_request"]["phase"] for each in client.requests] for client in prefills.clients.values()
    ]
    assert calls == [["prefill"], ["prefill"]]
    assert [step.partition(":")[0] for step in asked.trace.fallbacks] == ["other_instance"]
    LLM.kv_store.clear()
