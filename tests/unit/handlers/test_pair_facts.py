"""Two workers with different engines: no request is refused, cut or charged to a peer for what only one lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tests.support.handling import ORDERS, collect, raw_request, request, tokens_of, until
from tests.support.mounted_recording import mounted_recording_llm
from tests.support.recording_pair import recording_engine
from tests.support.stage_client import Instances, RecordingStageClient
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.engine_facts import EngineFacts
from trtllm_disagg.engines.recording.hard_edges import PESSIMISTIC
from trtllm_disagg.engines.recording.llm import RequestError, Script
from trtllm_disagg.engines.recording.result import scripted_token
from trtllm_disagg.errors import InvalidRequestError, KvTransferError, PeerUnavailableError
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.pair_facts import PairFacts
from trtllm_disagg.handlers.selection import RoundRobin, Selection
from trtllm_disagg.handlers.services import build_generate, peers_of
from trtllm_disagg.types import Generate, GenerateRequest
from trtllm_disagg.wire.bodies import decode_request
from trtllm_disagg.wire.migration_link import MigrationLink

pytestmark = pytest.mark.usefixtures("no_leaks")

#: Ends a prompt at 16 tokens where it is computed in one step.
ONE_STEP = {"enable_chunked_prefill": False, "max_num_tokens": 16}


def prompt(length: int) -> list[int]:
    return list(range(1, length + 1))


def answer_to(length: int, count: int) -> list[int]:
    return [scripted_token(prompt(length), position) for position in range(count)]


@dataclass(frozen=True, slots=True)
class Unequal:
    """A pair of unequal engines; `generate` is the first stage, `seconds` are its peers."""

    generate: Generate
    first: Engine
    seconds: list[RecordingStageClient]
    engines: list[Engine]
    live: LiveState

    async def answer(self, length: int, max_tokens: int, **keys: Any) -> tuple[list[int], GenerateRequest]:
        asked = request(max_tokens, token_ids=prompt(length), **keys)
        chunks = await collect(self.generate, asked)
        await self.quiet()
        return tokens_of(chunks), asked

    async def quiet(self) -> None:
        for client in self.seconds:
            await client.idle()
        await until(lambda: not num_in_background())


def unequal(
    strategy: str,
    prefill: dict[str, Any],
    decode: dict[str, Any],
    num_seconds: int = 1,
    first: dict[str, Any] | None = None,
    **settings: Any,
) -> Unequal:
    """`prefill`, `decode`: arguments of the engines. `first`: settings of the first stage alone."""
    args = {Role.PREFILL: prefill, Role.DECODE: decode}
    own, other = (Role.PREFILL, Role.DECODE) if strategy == "prefill_first" else (Role.DECODE, Role.PREFILL)

    def config(role: Role, **more: Any) -> WorkerConfig:
        return WorkerConfig(model="m", role=role, strategy=strategy, **settings, **more)

    engines, clients = [], []
    for _ in range(num_seconds):
        engine = recording_engine(**args[other])
        back = RecordingStageClient()
        client = RecordingStageClient(build_generate(config(other), engine, back))
        client.description = msgspec.to_builtins(engine.facts)
        engines.append(engine)
        clients.append(client)
    engine = recording_engine(**args[own])
    live = LiveState.of(config(own, **(first or {})), 32)
    peers = peers_of(config(own), Selection(Instances(clients), RoundRobin(), other.value), live.breaker)
    generate = build_generate(config(own, **(first or {})), engine, peers, live)
    return Unequal(generate, engine, clients, engines, live)


# -- lengths


async def test_an_answer_longer_than_prefills_engine_goes_on_at_another_decode_worker() -> None:
    pair = unequal("prefill_first", {"max_seq_len": 20}, {"max_seq_len": 60}, num_seconds=2)
    for engine in pair.engines:
        engine.llm.scripts.append(Script(error=KvTransferError("killed"), error_at=10))
    pair.engines[1].llm.scripts.clear()
    tokens, asked = await pair.answer(15, 30)
    assert tokens == answer_to(15, 30)
    assert [to for to, _ in asked.trace.steps] == ["other_instance"]


async def test_an_answer_longer_than_prefills_engine_is_an_error_without_a_decode_worker() -> None:
    """And neither "length" after the tokens that prefill's engine has room for, nor the client's fault."""
    pair = unequal("prefill_first", {"max_seq_len": 20}, {"max_seq_len": 60})
    pair.engines[0].llm.scripts.append(Script(error=KvTransferError("killed"), error_at=10))
    with pytest.raises(PeerUnavailableError):
        await pair.answer(15, 30)


def test_a_migrated_request_is_no_longer_than_its_prompt() -> None:
    body = raw_request(10, token_ids=prompt(40), migration_link=MigrationLink(15, 0).encode())
    read = decode_request(body, longest_prompt=20)
    assert (read.token_ids, read.stop.max_tokens) == (prompt(15), 35)
    assert read.migrated is not None
    assert read.migrated.delivered == prompt(40)[15:]
    with pytest.raises(InvalidRequestError, match="the prompt has 40 tokens"):
        decode_request(raw_request(10, token_ids=prompt(40)), longest_prompt=20)


@pytest.mark.parametrize("strategy", ["decode_first", "auto"])
async def test_a_prompt_longer_than_prefills_engine_is_answered_by_decode_alone(strategy: str) -> None:
    """Whether prefill has been discovered already or not."""
    pair = unequal(strategy, {"max_seq_len": 20}, {"max_seq_len": 60}, on_missing_stage="fail")
    for _ in range(2):
        tokens, asked = await pair.answer(30, 8)
        assert tokens == answer_to(30, 8)
        assert asked.trace.strategy == "local"
    assert pair.engines[0].llm.results == []


def test_the_answers_length_is_that_of_the_engine_that_decodes() -> None:
    asked = request(100, token_ids=prompt(10))
    short, long = EngineFacts(max_seq_len=20), EngineFacts(max_seq_len=60)
    assert PairFacts(Role.PREFILL, short, lambda: [short, long]).max_new_tokens(asked) == 50
    assert PairFacts(Role.PREFILL, short, lambda: [long, EngineFacts()]).max_new_tokens(asked) == 100
    assert PairFacts(Role.PREFILL, short).max_new_tokens(asked) == 100
    assert PairFacts(Role.DECODE, long, lambda: [short]).max_new_tokens(asked) == 50


# -- prompts that have to fit into one step


@pytest.mark.parametrize(
    ("strategy", "first", "keys"),
    [
        ("auto", {}, {}),
        ("decode_first", {"prefill_decider": "length", "thresholds": {"max_local_prefill_length": 100}}, {}),
        ("decode_first", {}, {"annotations": ["disagg:local"]}),
    ],
)
async def test_a_prompt_that_decode_cannot_prefill_goes_to_prefill(
    strategy: str, first: dict[str, Any], keys: dict[str, Any]
) -> None:
    pair = unequal(strategy, {}, ONE_STEP, first=first)
    tokens, asked = await pair.answer(20, 6, **keys)
    assert tokens == answer_to(20, 6)
    assert asked.trace.strategy == "decode_first"
    assert (await pair.answer(10, 6, **keys))[1].trace.strategy == "local", "of a shorter one"


async def test_a_prompt_that_decode_cannot_prefill_is_no_fault_of_the_client_while_prefill_is_gone() -> None:
    pair = unequal("decode_first", {}, ONE_STEP)
    pair.seconds[0].call = refusing_connections  # type: ignore[method-assign, assignment]
    with pytest.raises(PeerUnavailableError):
        await pair.answer(20, 6)
    assert (await pair.answer(10, 6))[0] == answer_to(10, 6)


async def refusing_connections(body: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
    for answer in list[dict[str, Any]]():
        yield answer
    raise PeerUnavailableError("connection refused")


@pytest.mark.parametrize("strategy", ORDERS)
async def test_a_prompt_that_neither_engine_takes_is_refused_by_name(strategy: str) -> None:
    pair = unequal(strategy, ONE_STEP, ONE_STEP)
    with pytest.raises(InvalidRequestError, match="20 tokens, and max_num_tokens is 16"):
        await pair.answer(20, 6)
    assert [engine.llm.results for engine in (pair.first, *pair.engines)] == [[], []]


async def test_the_one_prefill_worker_that_takes_the_prompt_is_picked() -> None:
    pair = unequal("decode_first", ONE_STEP, ONE_STEP, num_seconds=2)
    pair.seconds[1].description = {}
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            await pair.answer(20, 6)
    assert [len(client.calls) for client in pair.seconds] == [0, 2], "what is not known is tried"


# -- options


GUIDED: dict[str, Any] = {"sampling_options": {"guided_decoding": {"choice": ["yes", "no"]}}}


async def test_a_guide_that_decode_cannot_follow_is_refused_before_a_prefill() -> None:
    pair = unequal("decode_first", {"guided_decoding_backend": "xgrammar"}, {})
    with pytest.raises(InvalidRequestError, match="guided decoding needs guided_decoding_backend"):
        await pair.answer(10, 6, **GUIDED)
    assert [engine.llm.results for engine in (pair.first, *pair.engines)] == [[], []]


#: Each of them may be what a decode was refused for.
OPTIONS: dict[str, Any] = {
    "sampling_options": {"temperature": 0.7, "presence_penalty": 1.0},
    "output_options": {"logprobs": 3},
    "stop_conditions": {"max_tokens": 6, "min_tokens": 4, "stop_token_ids": [5]},
    "routing": {"cache_salt": "tenant"},
}


async def test_a_drain_has_no_options_of_its_request() -> None:
    with mounted_recording_llm(PESSIMISTIC):
        pair = unequal("prefill_first", {}, {})
        decode = pair.engines[0].llm
        decode.scripts.append(Script(error=RequestError("refused")))
        tokens, _ = await pair.answer(10, 6, **OPTIONS)
        assert tokens == answer_to(10, 6)
        refused, drain = decode.calls_of("generate_async")
        assert (refused["sampling_params"].logprobs, refused["sampling_params"].min_tokens) == (3, 4)
        params = drain["sampling_params"]
        assert (params.max_tokens, params.min_tokens, params.logprobs, params.stop_token_ids) == (
            1,
            *[None] * 3,
        )
        assert (params.presence_penalty, params.guided_decoding) == (None, None)
        assert drain["cache_salt"] == "tenant", "its blocks stay the tenant's"
        assert pair.first.llm.held_contexts == 0


# -- blame, and fetches


@pytest.mark.parametrize(("lease_ms", "opened"), [(200, 0), (60_000, 1)], ids=["lease over", "lease runs"])
@pytest.mark.parametrize("strategy", ORDERS)
async def test_only_kv_that_is_lost_before_its_lease_ends_in_decodes_queue_opens_a_breaker(
    strategy: str, lease_ms: int, opened: int
) -> None:
    lease = {"cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": lease_ms}}
    pair = unequal(strategy, lease, lease, breaker_failures=1, max_batch_size=1)
    decode = pair.engines[0] if strategy == "prefill_first" else pair.first
    gate = asyncio.Semaphore(0)
    decode.llm.scripts += [Script(gate=gate), Script(gate=gate, error=KvTransferError("the lease has ended"))]
    running = [asyncio.create_task(pair.answer(10, 6))]
    await until(lambda: decode.answering.count)
    running.append(asyncio.create_task(pair.answer(12, 6)))
    await until(lambda: len(decode.llm.results) > 1)
    await asyncio.sleep(0.12)  # most of the short lease
    for _ in range(20):
        gate.release()
    (first, _), (second, asked) = await asyncio.gather(*running)
    assert (first, second) == (answer_to(10, 6), answer_to(12, 6))
    assert pair.live.breaker.times_opened == opened
    assert asked.trace.steps[-1][0] == "local"
    prefill = pair.first if strategy == "prefill_first" else pair.engines[0]
    prefills = [each for each in prefill.llm.results if each.request_type == "context_only"]
    assert len(prefills) == 2, "a second prefill of the same prompt would wait in the same queue"


async def test_a_decode_worker_that_may_be_fetching_is_not_asked_for_a_drain() -> None:
    """Two requests with one handoff can end the engine that runs both; the lease ends by itself."""
    with mounted_recording_llm(PESSIMISTIC):
        pair = unequal("prefill_first", {}, {}, first_decode_token_timeout=0.2)
        decode, gate = pair.engines[0].llm, asyncio.Semaphore(0)
        decode.scripts.append(Script(gate=gate))
        answering = asyncio.create_task(collect(pair.generate, request(6, token_ids=prompt(10))))
        assert tokens_of(await answering) == answer_to(10, 6), "by prefill alone"
        await until(lambda: not num_in_background())
        assert len(decode.calls_of("generate_async")) == 1
        for _ in range(20):
            gate.release()
        await pair.quiet()


async def test_a_restarted_prefill_worker_with_the_id_of_the_one_before_is_met_at_its_new_place() -> None:
    """Under generation_first, where decode has to know the engine's endpoint."""
    runtime = {"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"}}
    pair = unequal("decode_first", runtime, runtime, schedule_style=ScheduleStyle.GENERATION_FIRST)
    prefill = pair.seconds[0]
    prefill.description["ctx_info_endpoint"] = "tcp://before:1"
    assert (await pair.answer(10, 6))[0] == answer_to(10, 6)
    prefill.description = prefill.description | {"ctx_info_endpoint": "tcp://after:1"}
    pair.first.llm.scripts.append(Script(error=KvTransferError("connection refused")))
    assert (await pair.answer(10, 6))[0] == answer_to(10, 6)
    await pair.answer(10, 6)
    params = [call.get("disaggregated_params") for call in pair.first.llm.calls_of("generate_async")]
    places = [each.ctx_info_endpoint for each in params if each is not None]
    assert (places[0], places[-1]) == ("tcp://before:1", "tcp://after:1")
