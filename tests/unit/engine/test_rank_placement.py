"""Which rank of attention DP a request runs on: what TensorRT-LLM is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.handling import request
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.engine.rank_placement import Affinity
from trtllm_disagg.engines.recording.mounted import mounted_recording_llm
from trtllm_disagg.errors import ConfigError

TALK = {"agent_context": {"session_id": " talk-1 "}, "routing": {"dp_rank": 1}}
IN_YAML = {"attention_dp_config": {"kv_cache_routing_conversation_affinity": True}}


@pytest.fixture(autouse=True)
def tensorrt_llm() -> Iterator[None]:
    with mounted_recording_llm():
        yield


def told(affinity: Affinity, keys: dict[str, Any], **args: Any) -> tuple[Any, Any]:
    """(conversation, rank) as the engine hears of them."""
    args |= {"model": "m", "max_seq_len": 99, "enable_attention_dp": True, "tensor_parallel_size": 2}
    engine = Engine.open(load_api("tensorrt_llm"), args, 0, affinity)
    engine.start_agg(request(**keys))
    (call,) = engine.llm.calls_of("generate_async")
    conversation, scheduling = call.get("conversation_params"), call.get("scheduling_params")
    return (
        conversation and conversation.conversation_id,
        scheduling and (scheduling.attention_dp_rank, scheduling.attention_dp_relax),
    )


@pytest.mark.parametrize(
    ("affinity", "keys", "args", "heard"),
    [
        (Affinity(), TALK, {}, (None, (1, False))),
        (Affinity(is_on=True), TALK, {}, ("talk-1", None)),
        (Affinity(), TALK, IN_YAML, ("talk-1", None)),
        (Affinity(is_on=True, by_router=True), TALK, {}, ("talk-1", (1, False))),
        (Affinity(is_on=True, by_router=True), {"routing": {"dp_rank": 1}}, {}, (None, None)),
        (Affinity(is_on=True), {"agent_context": {"session_id": "  "}}, {}, (None, None)),
        (Affinity(is_on=True), {"agent_context": "text"}, {}, (None, None)),
    ],
)
def test_conversation_and_rank_reach_the_engine(
    affinity: Affinity, keys: dict[str, Any], args: dict[str, Any], heard: tuple[Any, Any]
) -> None:
    assert told(affinity, keys, **args) == heard


@pytest.mark.parametrize("flag", [True, False])
def test_an_affinity_that_the_engine_has_not_is_refused_by_the_key_that_asks_for_it(flag: bool) -> None:
    api = load_api("recording")
    args = {"model": "m", "max_seq_len": 99} | ({} if flag else IN_YAML)
    named = "^--conversation-affinity: " if flag else "^attention_dp_config.kv_cache_routing_conversation_aff"
    with pytest.raises(ConfigError, match=named):
        Engine.open(api, args, 0, Affinity(is_on=flag))
