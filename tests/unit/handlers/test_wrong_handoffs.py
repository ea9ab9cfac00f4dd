"""Handoffs with fields of wrong types: the request is refused, and TensorRT-LLM's process lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.day_one import Both
from tests.support.handling import collect, expected_tokens, request, tokens_of
from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.types import TokenChunk

pytestmark = pytest.mark.usefixtures("tensorrt_llm")

Fields = dict[str, Any]


def both_workers() -> Both:
    python = {"backend": "NIXL", "transceiver_runtime": "PYTHON"}
    return Both("decode_first", cache_transceiver_config=python)


async def decoded(both: Both, change: Callable[[Fields], Fields]) -> list[TokenChunk]:
    """The decode worker's answer to a handoff of the prefill worker with changed fields."""
    asked = request(phase_request={"phase": "prefill", "attempts": ["a"], "sender": 2})
    (prefilled,) = await collect(both.handlers[Role.PREFILL], asked)
    assert prefilled.disaggregated_params is not None
    handoff = {
        "disaggregated_params": prefilled.disaggregated_params | change(prefilled.disaggregated_params)
    }
    return await collect(
        both.handlers[Role.DECODE], request(phase_request={"phase": "decode"}, prefill_result=handoff)
    )


async def test_a_list_of_one_endpoint_is_served() -> None:
    both = both_workers()
    chunks = await decoded(both, lambda given: {"ctx_info_endpoint": [given["ctx_info_endpoint"]]})
    assert tokens_of(chunks) == expected_tokens(5)[1:]
    assert both.engines[Role.DECODE].fatal_error is None


@pytest.mark.parametrize(
    "changed",
    [{"ctx_info_endpoint": ["tcp://a", "tcp://b"]}, {"ctx_request_id": "7"}, {"first_gen_tokens": ["a"]}],
    ids=str,
)
async def test_a_field_of_a_wrong_type_fails_its_request_alone(changed: dict[str, Any]) -> None:
    both = both_workers()
    with pytest.raises(HandoffRefusedError, match=next(iter(changed))):
        await decoded(both, lambda given: changed)
    assert both.engines[Role.DECODE].fatal_error is None
    assert tokens_of(await collect(both.handlers[Role.DECODE], request())) == expected_tokens(5)
