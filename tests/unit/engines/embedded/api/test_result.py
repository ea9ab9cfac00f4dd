"""RequestOutput on its own: what is delivered on one side comes out on the other, in order, once."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from trtllm_disagg.engines.embedded.api.result import Logprob, RequestError, RequestOutput
from trtllm_disagg.engines.embedded.ipc.messages import MadeHandoff, TokenOutput


def request(num_choices: int = 1, *, streaming: bool = True, **more: Any) -> RequestOutput:
    return RequestOutput(
        request_id=7,
        prompt=None,
        prompt_token_ids=[1, 2],
        num_choices=num_choices,
        streaming=streaming,
        abort=lambda _: None,
        **more,
    )


def tokens(*ids: int, index: int = 0, end: str | None = None, **more: Any) -> TokenOutput:
    return TokenOutput(7, index, list(ids), finish_reason=end, **more)


def deliver(result: RequestOutput, *outputs: TokenOutput | RequestError) -> None:
    """As the engine's receiver thread does."""
    for output in outputs:
        result.deliver(output)
    assert result.loop is not None
    result.loop.call_soon_threadsafe(result.wake)


# -- in an event loop


async def test_tokens_delivered_at_once_are_one_update() -> None:
    result = request()
    deliver(result, tokens(5), tokens(6))
    await anext(result)
    assert (result.outputs[0].token_ids, result.finished) == ([5, 6], False)
    deliver(result, tokens(8, end="length"))
    await anext(result)
    assert result.outputs[0].token_ids == [5, 6, 8]
    assert result.outputs[0].token_ids_diff == [8]
    assert [update async for update in result] == []


async def test_no_token_is_lost_between_a_busy_thread_and_a_busy_reader() -> None:
    result, count = request(), 2000

    def produce() -> None:
        for i in range(count):
            deliver(result, tokens(i, end="length" if i == count - 1 else None))

    thread = threading.Thread(target=produce)
    thread.start()
    async for _ in result:
        pass
    thread.join()
    assert result.outputs[0].token_ids == list(range(count))


async def test_two_readers_share_the_updates() -> None:
    """Dynamo's deferred abort reads in the background while the handler does."""
    result = request()
    readers = [asyncio.ensure_future(anext(result)) for _ in range(2)]
    await asyncio.sleep(0)
    deliver(result, tokens(5))
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    deliver(result, tokens(6, end="length"))
    await asyncio.gather(*readers)
    assert result.outputs[0].token_ids == [5, 6]


async def test_a_reader_gets_what_comes_after_another_one_was_cancelled() -> None:
    result = request()
    cancelled = asyncio.ensure_future(anext(result))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    reader = asyncio.ensure_future(anext(result))
    await asyncio.sleep(0)
    deliver(result, tokens(5))
    await reader
    assert result.outputs[0].token_ids == [5]


async def test_an_error_ends_the_iteration_once() -> None:
    result = request()
    deliver(result, tokens(5), TokenOutput(7, error="the pool burnt down", error_category="Unavailable"))
    with pytest.raises(RequestError, match="the pool burnt down") as error:
        await result
    assert error.value.category == "Unavailable"
    assert result.finished
    assert result.outputs[0].token_ids == [5]
    assert [update async for update in result] == []


async def test_a_blocked_loop_gets_its_tokens_all_the_same() -> None:
    result = request()
    threading.Timer(0.01, deliver, (result, tokens(5, end="length"))).start()
    assert result.result(timeout=10).outputs[0].token_ids == [5]


# -- in a thread


def test_waiting_has_a_deadline() -> None:
    with pytest.raises(queue.Empty):
        request().result(timeout=0.01)


async def test_a_request_of_a_thread_cannot_be_awaited() -> None:
    result = await asyncio.to_thread(request)
    with pytest.raises(RuntimeError, match="outside of an event loop"):
        await result


# -- how outputs grow


def test_stop_word_removes_its_delivered_start_and_logprobs() -> None:
    result = request(streaming=False)
    for token in (5, 6):
        result.deliver(tokens(token, logprobs=[[(token, -0.5, 1)]]))
    result.deliver(tokens(trim=1, end="stop", stop_reason="word"))
    output = result.result().outputs[0]
    assert output.token_ids == [5]
    assert output.logprobs == [{5: Logprob(-0.5, 1)}]
    assert output.cumulative_logprob == -0.5


def test_a_handoff_is_on_the_output_and_on_the_result() -> None:
    result = request(streaming=False, disagg_request_id=3)
    result.deliver(tokens(5, end="length", handoff=MadeHandoff(b"state", [5], 7, "tcp://h:1")))
    params = result.result().outputs[0].disaggregated_params
    assert params is result.disaggregated_params
    assert params is not None
    assert (params.request_type, params.opaque_state, params.first_gen_tokens) == (
        "context_only",
        b"state",
        [5],
    )
    assert (params.ctx_request_id, params.ctx_info_endpoint, params.disagg_request_id) == (3, "tcp://h:1", 3)
