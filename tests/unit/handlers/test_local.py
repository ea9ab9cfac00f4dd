"""The phases on this worker's own engine: what they ask of it, and what they make of its answers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.support.handling import PROMPT, collect, expected_tokens, request, tokens_of, until
from tests.support.recording_pair import leftover_tasks, recording_engine
from tests.support.stage_client import FakeContext
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engines.embedded.api.result import RequestOutput as EmbeddedOutput
from trtllm_disagg.engines.embedded.ipc.messages import TokenOutput
from trtllm_disagg.engines.recording.llm import LLM, RequestError, Script
from trtllm_disagg.errors import (
    DisaggError,
    EngineError,
    InvalidRequestError,
    KvTransferError,
    StageTimeoutError,
    WorkerLeavingError,
)
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.local import LocalAgg, LocalDecode, LocalPrefill
from trtllm_disagg.handlers.outputs import at_once
from trtllm_disagg.handlers.peers import DECODE
from trtllm_disagg.types import GenerateRequest, Handoff, TokenChunk, Usage
from trtllm_disagg.wire.bodies import decode_request, encode_request

pytestmark = pytest.mark.usefixtures("no_leaks")


class CategorizedError(RequestError):
    """As the embedded engine reports an error's category."""

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


async def prefill(engine: Engine, max_tokens: int | None = 5, **keys: Any) -> Handoff:
    return await LocalPrefill(engine)(request(max_tokens, **keys), FakeContext())


async def prefilled(max_tokens: int | None = 5, **keys: Any) -> GenerateRequest:
    """A request with KV that waits for a decode, as that worker gets it."""
    asked = request(max_tokens, **keys)
    handoff = await LocalPrefill(recording_engine())(asked, FakeContext())
    return decode_request(encode_request(asked.with_handoff(handoff), DECODE))


def no_handoff() -> Handoff:
    return Handoff(TokenChunk([]), None)


async def decode(
    asked: GenerateRequest,
    engine: Engine | None = None,
    handoff: Handoff | None = None,
    *,
    repeats: bool = False,
) -> list[TokenChunk]:
    phase = LocalDecode(engine or recording_engine(), repeats_first_token=repeats, notify=at_once)
    return [chunk async for chunk in phase(asked, FakeContext(), handoff or no_handoff())]


async def test_a_cancelled_decode_of_the_embedded_engine_is_aborted_at_its_first_output() -> None:
    aborted: list[int] = []
    result = EmbeddedOutput(
        request_id=7,
        prompt=None,
        prompt_token_ids=list(PROMPT),
        num_choices=1,
        streaming=True,
        abort=aborted.append,
    )
    engine = recording_engine()
    engine.start_decode = lambda *_, **__: result  # type: ignore[method-assign]
    client = asyncio.create_task(decode(request(), engine))
    for _ in range(5):  # until it waits for an output
        await asyncio.sleep(0)
    client.cancel()
    await asyncio.wait([client])
    assert aborted == []
    result.deliver(TokenOutput(7, token_ids=[5]))
    result.wake()
    await until(lambda: aborted)
    result.deliver(TokenOutput(7, finish_reason="cancelled"))
    result.wake()
    await until(lambda: not num_in_background())


# -- prefill


@pytest.mark.parametrize("ends_with", ["length", "not_finished"])
@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_a_prefill_ends_with_length_only_if_one_token_was_asked_for(
    ends_with: str, max_tokens: int
) -> None:
    """Dynamo's frontend answers 500 to a finish reason that it does not know."""
    engine = recording_engine()
    engine.llm.scripts.append(Script(ends_with=ends_with))
    handoff = await prefill(engine, max_tokens)
    if max_tokens == 1:
        assert handoff.is_final
        assert handoff.first.finish_reason == "length"
        assert handoff.first.completion_usage is not None
    else:
        assert not handoff.is_final
        assert handoff.first == TokenChunk(expected_tokens(1), completion_usage=Usage.of(3, 1, 0))
        handoff.release()
        handoff.release()
        assert engine.llm.results[0].aborts == [1]


async def test_a_prefill_without_a_handoff_is_the_engines_fault() -> None:
    engine = recording_engine()
    result = engine.start_agg(request(max_tokens=1))
    await result.aresult()
    engine.llm.generate_async = lambda **_: result
    with pytest.raises(EngineError, match="without disaggregated_params"):
        await prefill(engine)


async def test_an_engine_that_cancels_by_itself_has_failed() -> None:
    engine = recording_engine()
    engine.llm.scripts.append(Script(ends_with="cancelled"))
    with pytest.raises(EngineError, match="without a token"):
        await prefill(engine)


# -- decode


async def test_decode_repeats_the_first_token_only_where_the_client_lacks_it() -> None:
    whole = await decode(await prefilled(), repeats=True)
    assert tokens_of(whole) == expected_tokens(5)
    rest = await decode(await prefilled())
    assert rest == whole[1:]


@pytest.mark.parametrize("error", [None, InvalidRequestError, WorkerLeavingError])
async def test_decode_leaves_a_handoff_that_the_engine_has_not_accepted(
    error: type[DisaggError] | None,
) -> None:
    engine = recording_engine(max_seq_len=len(PROMPT) if error is InvalidRequestError else 64)
    if error is WorkerLeavingError:
        engine.close()
    calls: list[str] = []
    handoff = Handoff(TokenChunk([]), None, on_release=lambda handoff: calls.append("released"))
    if error is None:
        await decode(await prefilled(), engine, handoff)
    else:
        with pytest.raises(error):
            await decode(await prefilled(), engine, handoff)
    handoff.release()
    assert calls == ([] if error is None else ["released"])
    LLM.kv_store.clear()


async def test_decode_without_logprobs_of_the_first_token_gives_the_others() -> None:
    """Older TensorRT-LLM does not carry them."""
    asked = await prefilled(output_options={"logprobs": 1})
    assert asked.prefill_result is not None
    del asked.prefill_result.disaggregated_params["first_gen_log_probs"]
    chunks = await decode(asked, repeats=True)
    assert tokens_of(chunks) == expected_tokens(5)
    assert chunks[0].log_probs is None
    assert chunks[1].log_probs == [-1.0]


def drain_of(asked: GenerateRequest) -> GenerateRequest:
    return asked.only_fetching(Handoff(TokenChunk([]), asked.prefill_result))


async def test_a_drain_fetches_one_token_and_drops_it() -> None:
    engine = recording_engine()
    asked = await prefilled()
    LocalDecode(engine, repeats_first_token=False).drain(drain_of(asked))
    assert len(LLM.kv_store) == 1
    assert await leftover_tasks() == set()
    assert len(LLM.kv_store) == 0
    assert [result.outputs[0].length for result in engine.llm.results] == [1]


async def test_failed_drain_logs_no_warning_and_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    engine, closed = recording_engine(), recording_engine()
    asked = await prefilled()
    LLM.kv_store.clear()
    closed.close()
    LocalDecode(engine, repeats_first_token=False).drain(asked)
    LocalDecode(closed, repeats_first_token=False).drain(asked)
    assert await leftover_tasks() == set()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- both phases


# -- errors, in every phase


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("boom"), EngineError),
        (CategorizedError("boom", "InvalidRequest"), InvalidRequestError),
        (CategorizedError("boom", "Unavailable"), KvTransferError),
        (CategorizedError("boom", "Internal"), EngineError),
        (CategorizedError("boom", "never heard of"), EngineError),
    ],
)
async def test_an_engines_error_has_the_kind_of_its_category(
    error: Exception, kind: type[DisaggError]
) -> None:
    for phase in ("prefill", "decode", "both"):
        engine = recording_engine()
        engine.llm.scripts.append(Script(error=error))
        with pytest.raises(DisaggError, match="boom") as caught:
            await run(phase, engine)
        assert type(caught.value) is kind


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
@pytest.mark.parametrize(
    ("script", "is_healthy", "error"),
    [
        (Script(error=RequestError("the engine process ended")), False, WorkerLeavingError),
        (Script(ends_with="timeout"), True, StageTimeoutError),
    ],
)
async def test_a_dead_or_late_engine_raises_an_error_that_goes_on_elsewhere(
    phase: str, script: Script, is_healthy: bool, error: type[DisaggError]
) -> None:
    engine = recording_engine()
    engine.llm.scripts.append(script)
    engine.llm.is_healthy = is_healthy
    with pytest.raises(error):
        await run(phase, engine)


async def run(phase: str, engine: Engine) -> None:
    if phase == "prefill":
        await prefill(engine)
    elif phase == "decode":
        await decode(await prefilled(), engine)
    else:
        await collect(LocalAgg(engine), request())
