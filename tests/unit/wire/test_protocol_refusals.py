"""A handoff from the network is checked key by key, in whichever protocol it comes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import ORDERS, collect, expected_tokens, raw_request, request, tokens_of
from tests.support.recording_pair import make_pair
from tests.unit.wire.test_protocol_bodies import ASKING, HANDED_OVER, PARAMS
from trtllm_disagg.config.worker_config import Role, ScheduleStyle, WorkerConfig
from trtllm_disagg.engines.recording.llm import LLM
from trtllm_disagg.errors import ConfigError, HandoffRefusedError
from trtllm_disagg.types import PrefillResult, TokenChunk
from trtllm_disagg.wire.bodies import decode_request
from trtllm_disagg.wire.handoff_formats import result_of

WITHOUT = object()
FORGED: list[tuple[dict[str, Any], str]] = [
    ({"do_remote_prefill": "yes"}, "bool"),
    ({"do_remote_decode": True}, "both true"),
    ({"do_remote_prefill": False}, "no prefill was done"),
    ({"do_remote_decode": WITHOUT}, "do_remote_decode"),
    ({"remote_engine_id": WITHOUT}, "remote_engine_id"),
    ({"remote_engine_id": 5}, "str"),
    ({"remote_engine_id": "x" * 200}, "128"),
    ({"remote_engine_id": "engine-b"}, "remote_engine_id is not as expected: what its remote_handle says"),
    ({"remote_engine_id": None}, "remote_engine_id is not as expected"),
    ({"remote_block_ids": WITHOUT}, "remote_block_ids"),
    ({"remote_block_ids": [4, 10]}, "remote_block_ids is not as expected"),
    ({"remote_block_ids": [-1]}, ">= 0"),
    ({"remote_block_ids": [2**31]}, "<= 2147483647"),
    ({"remote_block_ids": [0] * ((1 << 20) + 1)}, "1048576"),
    ({"remote_block_ids": "4,9"}, "array"),
    ({"remote_host": WITHOUT}, "remote_host"),
    ({"remote_host": "10.0.0.8"}, "remote_host is not as expected"),
    ({"remote_host": "h" * 300}, "253"),
    ({"remote_port": WITHOUT}, "remote_port"),
    ({"remote_port": 41001}, "remote_port is not as expected"),
    ({"remote_port": 70000}, "65535"),
    ({"remote_port": True}, "int"),
    ({"remote_handle": WITHOUT}, "remote_handle is missing"),
    ({"remote_handle": None}, "remote_handle is missing"),
    ({"remote_handle": "x"}, "object"),
    ({"remote_handle": {}}, "remote_engine_id is not as expected"),
    ({"remote_handle": {"opaque_state": "a3Y="}}, "remote_engine_id is not as expected"),
    ({"remote_handle": {"opaque_state": 5}}, "remote_engine_id is not as expected"),
    ({"remote_cached_tokens": -1}, ">= 0"),
]


def forged(change: dict[str, Any], of: dict[str, Any] = HANDED_OVER) -> dict[str, Any]:
    return {key: value for key, value in (of | change).items() if value is not WITHOUT}


@pytest.mark.parametrize(("change", "named"), FORGED)
def test_forged_params_are_refused_in_a_body_and_in_an_answer(change: dict[str, Any], named: str) -> None:
    nones: tuple[Any, ...] = (5, "x", [], {}, {"do_remote_prefill": True}, ASKING | {"remote_port": 5})
    for none in nones:
        with pytest.raises(HandoffRefusedError, match=r"kv_transfer_params|no prefill was done"):
            decode_request(raw_request(kv_transfer_params=none))
    params = forged(change)
    with pytest.raises(HandoffRefusedError, match=named) as caught:
        decode_request(raw_request(kv_transfer_params=params))
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400
    with pytest.raises(HandoffRefusedError, match=named):
        result_of(TokenChunk([7], kv_transfer_params=params))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"bootstrap_host": WITHOUT}, "bootstrap_host missing"),
        ({"bootstrap_port": None}, "bootstrap_port missing"),
        ({"bootstrap_room": WITHOUT, "bootstrap_port": None}, "bootstrap_port, bootstrap_room missing"),
        ({"bootstrap_room": -1}, ">= 0"),
        ({"bootstrap_room": 1 << 63}, "bootstrap_room"),
        ({"bootstrap_room": "5"}, "bootstrap_room"),
        ({"bootstrap_port": 0}, ">= 1"),
        ({"bootstrap_host": ""}, "bootstrap_host"),
        ({"bootstrap_host": "a/b"}, "no host"),
        ({"bootstrap_host": "a:1@b"}, "no host"),
        ({"bootstrap_host": "[::1]"}, "no host"),
        ({"bootstrap_host": "h" * 300}, "bootstrap_host"),
    ],
)
def test_an_unusable_room_is_refused(keys: dict[str, Any], named: str) -> None:
    room: dict[str, Any] = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 41000, "bootstrap_room": 5}
    decode_request(raw_request(**room))
    with pytest.raises(HandoffRefusedError, match=named):
        decode_request(raw_request(**forged(keys, room)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disagg_request_id", -1),
        ("disagg_request_id", 2**63),
        ("disagg_request_id", True),
        ("ctx_dp_rank", 2**31),
        ("ctx_dp_rank", True),
    ],
)
def test_rendezvous_with_a_number_that_no_engine_can_read_is_refused(key: str, value: int) -> None:
    rendezvous: dict[str, Any] = {"disagg_request_id": 5, "ctx_info_endpoint": "tcp://a:1", "ctx_dp_rank": 0}
    decode_request(raw_request(rendezvous=rendezvous))
    with pytest.raises(HandoffRefusedError, match=key):
        decode_request(raw_request(rendezvous=rendezvous | {key: value}))


@pytest.mark.parametrize(
    "keys",
    [
        {"prefill_result": {"disaggregated_params": PARAMS}},
        {"rendezvous": {"disagg_request_id": 5, "ctx_info_endpoint": ["tcp://a:1"]}},
        {"bootstrap_host": "a", "bootstrap_port": 1, "bootstrap_room": 1},
    ],
)
def test_a_handoff_that_is_told_twice_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(HandoffRefusedError, match=r"kv_transfer_params.*expected at most one"):
        decode_request(raw_request(kv_transfer_params=HANDED_OVER, **keys))


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([PARAMS, "engine-a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


PLACE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")


@given(st.dictionaries(st.sampled_from(sorted(HANDED_OVER)), junk))
def test_no_params_break_the_reader(change: dict[str, Any]) -> None:
    """Either they are refused, or they say what the handle says."""
    try:
        read = decode_request(raw_request(kv_transfer_params=HANDED_OVER | change))
    except HandoffRefusedError:
        return
    assert read.prefill_result is None or isinstance(read.prefill_result, PrefillResult)
    if read.prefill_result is not None and read.prefill_result.disaggregated_params == PARAMS:
        assert all(value == HANDED_OVER[key] for key, value in change.items() if key in PLACE)


# -- a forger between the two stages


#: What a reader finds, and what only the handle tells.
FORGERIES: list[dict[str, Any]] = [{"remote_port": "x"}, {"remote_engine_id": "engine-b"}]


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("change", FORGERIES)
@pytest.mark.parametrize("order", ORDERS)
async def test_a_request_whose_handoff_was_forged_is_answered_locally(
    order: str, change: dict[str, Any]
) -> None:
    pair = make_pair(order, handoff_protocol="two_phase")
    forge(pair.client, lambda params: forged(change, params))
    asked = request()
    assert tokens_of(await collect(pair.generate, asked)) == expected_tokens(5)
    await pair.idle()
    assert len(LLM.kv_store) == 0
    assert asked.trace.strategy == "local"
    assert "kv_transfer_params" in asked.trace.fallbacks[0]


def forge(client: Any, change: Any) -> None:
    """On its way to the second stage and back, every handoff goes through `change`."""
    call = client.call

    async def forging(raw: dict[str, Any], context: Any) -> Any:
        if raw["kv_transfer_params"]["do_remote_prefill"]:
            raw = raw | {"kv_transfer_params": change(raw["kv_transfer_params"])}
        stream = call(raw, context)
        try:
            async for answer in stream:
                if "kv_transfer_params" in answer:
                    answer = answer | {"kv_transfer_params": change(answer["kv_transfer_params"])}
                yield answer
        finally:
            await stream.aclose()

    client.call = forging


# -- configuration


@pytest.mark.parametrize(
    ("protocol", "style", "needed"),
    [("bootstrap", "context_first", "generation_first"), ("two_phase", "generation_first", "context_first")],
)
def test_a_protocol_of_the_other_style_is_refused(protocol: str, style: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=rf"--handoff-protocol: '{protocol}' .*--schedule-style {needed}"):
        WorkerConfig(
            model="m", role=Role.DECODE, schedule_style=ScheduleStyle(style), handoff_protocol=protocol
        )
