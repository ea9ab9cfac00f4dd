"""The bodies of the three handoff protocols, written out; and that nothing of a request is lost in them."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_disagg.errors import ConfigError, HandoffRefusedError
from trtllm_disagg.handlers.peers import DECODE, PREFILL
from trtllm_disagg.types import (
    Handoff,
    PhaseRequest,
    PrefillResult,
    PromptTokensDetails,
    Rendezvous,
    TokenChunk,
    WireRequest,
)
from trtllm_disagg.wire.bodies import (
    decode_chunk,
    decode_request,
    encode_chunk,
    encode_notice,
    encode_request,
)
from trtllm_disagg.wire.handoff_formats import result_of
from trtllm_disagg.wire.handoff_protocols import PROTOCOLS, BootstrapProtocol, choose_protocol
from trtllm_disagg.wire.kv_handle import KvHandle

HANDLE = KvHandle(
    version=1,
    sender="engine-a",
    endpoint="unix:///run/kv/prefill-1",
    lease=b"l" * 16,
    layout=b"a" * 16,
    prompt=b"p" * 16,
    num_tokens=3,
    blocks=[4, 9],
    seed=1,
)
OPAQUE = base64.b64encode(HANDLE.encode()).decode()
PARAMS = {"request_type": "context_only", "first_gen_tokens": [7], "opaque_state": OPAQUE}
HANDOFF = Handoff(TokenChunk([7], log_probs=[-0.5]), PrefillResult(PARAMS, PromptTokensDetails(2)))
ROOM = Rendezvous(1 << 41, ["tcp://10.0.0.7:41000"])


def asked() -> dict[str, Any]:
    """Every field that a protocol touches is set by the caller, and some that are unknown."""
    return {
        "model": "m",
        "token_ids": [11, 12, 13],
        "max_tokens": 50,
        "max_completion_tokens": 40,
        "min_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop_conditions": {"max_tokens": 50, "min_tokens": 3, "stop": None, "max_thinking_tokens": 9},
        "sampling_options": {"temperature": 0.5, "new_option": [1]},
        "extra_args": {"deep": [{"er": None}]},
    }


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 1,
    "total_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
}
HANDED_OVER = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "engine-a",
    "remote_block_ids": [4, 9],
    "remote_host": "/run/kv/prefill-1",
    "remote_port": 1,
    "remote_handle": PARAMS,
    "remote_cached_tokens": 2,
}
ASKING = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
FIRST = {"token_ids": [7], "log_probs": [-0.5], "finish_reason": "length", "completion_usage": USAGE}


def over_the_wire(message: Any) -> Any:
    return json.loads(json.dumps(message, allow_nan=False))


def body(protocol: str, phase_request: PhaseRequest, raw: dict[str, Any], **given: Any) -> Any:
    """What another worker gets, without what only one of 0.2 reads; the caller's own is as it was."""
    before = copy.deepcopy(raw)
    request = decode_request(raw)
    if "handoff" in given:
        request = request.with_handoff(given["handoff"])
    if "rendezvous" in given:
        request = request.with_rendezvous(given["rendezvous"])
    sent = over_the_wire(choose_protocol(protocol).encode(request, phase_request))
    assert raw == before
    del sent["errand"]  # of 0.2
    return sent


def answer(protocol: str, handoff: Handoff = HANDOFF) -> Any:
    return over_the_wire(encode_chunk(choose_protocol(protocol).answer(handoff, 3)))


# -- golden


def test_dynamos_bodies_have_the_phase_request_and_the_prefill_result() -> None:
    assert body("dynamo", PREFILL, asked()) == asked() | {"phase_request": {"phase": "prefill"}}
    assert answer("dynamo") == FIRST | {"disaggregated_params": PARAMS}
    handed_over = {"disaggregated_params": PARAMS, "prompt_tokens_details": {"cached_tokens": 2}}
    assert body("dynamo", DECODE, asked(), handoff=HANDOFF) == asked() | {
        "phase_request": {"phase": "decode"},
        "prefill_result": handed_over,
    }


def test_a_two_phase_prefill_asks_for_one_token_and_remote_decode() -> None:
    assert body("two_phase", PREFILL, asked()) == {
        "model": "m",
        "token_ids": [11, 12, 13],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "stop_conditions": {"max_tokens": 1, "min_tokens": 1, "stop": None, "max_thinking_tokens": 9},
        "sampling_options": {"temperature": 0.5, "new_option": [1]},
        "extra_args": {"deep": [{"er": None}]},
        "kv_transfer_params": ASKING,
        "phase_request": {"phase": "prefill"},
    }


def test_two_phase_adds_no_field_that_a_body_has_not() -> None:
    assert body("two_phase", PREFILL, {"token_ids": [11]}) == {
        "token_ids": [11],
        "stop_conditions": {"max_tokens": 1},
        "kv_transfer_params": ASKING,
        "phase_request": {"phase": "prefill"},
    }


def test_a_two_phase_answer_has_kv_transfer_params_and_decode_the_callers_fields_again() -> None:
    assert answer("two_phase") == FIRST | {"kv_transfer_params": HANDED_OVER}
    assert body("two_phase", DECODE, asked(), handoff=HANDOFF) == asked() | {
        "phase_request": {"phase": "decode"},
        "kv_transfer_params": HANDED_OVER,
    }


def test_two_phase_carries_the_opaque_handle_of_an_engine() -> None:
    handoff = Handoff(TokenChunk([7]), PrefillResult({"opaque_state": "a3Y="}))
    handed_over = answer("two_phase", handoff)["kv_transfer_params"]
    assert handed_over == ASKING | {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_handle": {"opaque_state": "a3Y="},
        "remote_cached_tokens": None,
    }
    assert result_of(decode_chunk(answer("two_phase", handoff))) == handoff.result


def test_bootstrap_bodies_name_host_port_and_room() -> None:
    for phase_request in (PREFILL, DECODE):
        assert body("bootstrap", phase_request, asked(), rendezvous=ROOM) == asked() | {
            "phase_request": {"phase": phase_request.phase},
            "bootstrap_host": "10.0.0.7",
            "bootstrap_port": 41000,
            "bootstrap_room": 1 << 41,
        }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_final_answer_and_a_whole_request_are_the_same_in_all(protocol: str) -> None:
    final = Handoff(TokenChunk([], finish_reason="stop"), None)
    assert answer(protocol, final) == {"token_ids": [], "finish_reason": "stop"}
    phase_request = PhaseRequest("whole", "prefill_first")
    sent = asked() | {"phase_request": {"phase": "whole", "strategy": "prefill_first"}}
    assert body(protocol, phase_request, asked()) == sent


def test_a_worker_of_02_reads_what_it_is_asked_and_is_understood() -> None:
    asks = PhaseRequest("prefill", attempts=("a",), sender=2, fetched=("b",))
    old = {"stage": "prefill", "attempts": ["a"], "sender": 2, "taken": ["b"]}
    sent = over_the_wire(encode_request(decode_request(asked()), asks))
    assert sent["errand"].items() >= old.items()  # of 0.2
    assert decode_request(asked() | {"errand": old}).phase_request == asks  # of 0.2
    notice = PhaseRequest("fetched", attempts=("a",))
    sent = over_the_wire(encode_notice(notice))
    assert sent["errand"].items() >= {"stage": "taken", "attempts": ["a"]}.items()  # of 0.2
    del sent["phase_request"]
    assert decode_request(sent | {"token_ids": [1]}).phase_request == notice


# -- meetings


def test_bootstrap_room_is_random_below_2_to_the_63() -> None:
    rooms = [BootstrapProtocol().adapt(ROOM) for _ in range(100)]
    ids = [room.disagg_request_id for room in rooms]
    assert len(set(ids)) == 100
    assert all(1 << 40 <= number < 1 << 63 for number in ids)
    assert max(ids) > 1 << 58, "not only small ones"
    assert {tuple(room.ctx_info_endpoint) for room in rooms} == {tuple(ROOM.ctx_info_endpoint)}


@pytest.mark.parametrize(
    ("endpoint", "host"), [("tcp://[::1]:80", "::1"), ("unix:///run/kv/prefill-1", "/run/kv/prefill-1")]
)
def test_an_ipv6_host_has_no_brackets_in_a_body_and_a_socket_file_is_a_host(endpoint: str, host: str) -> None:
    sent = body("bootstrap", DECODE, asked(), rendezvous=Rendezvous(5, [endpoint]))
    assert sent["bootstrap_host"] == host
    assert decode_request(sent).rendezvous == Rendezvous(5, [endpoint])


@pytest.mark.parametrize("endpoint", ["ipc:///x", "tcp://a:0"])
def test_rendezvous_without_host_and_port_is_refused_by_bootstrap(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--handoff-protocol bootstrap needs a host and a port"):
        BootstrapProtocol().adapt(Rendezvous(5, endpoint))


@pytest.mark.parametrize("endpoints", [[], ["tcp://a:1", "tcp://b:2"]])
def test_rendezvous_with_several_endpoints_is_refused(endpoints: list[str]) -> None:
    meeting = {"disagg_request_id": 5, "ctx_info_endpoint": endpoints}
    with pytest.raises(HandoffRefusedError, match="expected one"):
        decode_request({"token_ids": [1], "rendezvous": meeting})


# -- any request

_HANDOFFS = "prefill_result kv_transfer_params rendezvous bootstrap_host bootstrap_port bootstrap_room"
KEYS_OF_PROTOCOLS = {"phase_request", *_HANDOFFS.split()}
leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5)
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)
requests = st.builds(
    lambda extra, tokens, stop, options: extra | {"token_ids": tokens} | stop | options,
    st.dictionaries(
        st.text().filter(lambda key: key not in WireRequest.__struct_fields__), trees, max_size=3
    ),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.just({})
    | st.fixed_dictionaries(
        {
            "stop_conditions": st.none()
            | st.fixed_dictionaries(
                {},
                optional={
                    "max_tokens": st.none() | st.integers(1, 9),
                    "min_tokens": st.none() | st.integers(0, 9),
                    "stop": st.none() | st.lists(st.text(max_size=2), max_size=2),
                },
            )
        }
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.none() | st.integers(1, 9),
            "max_completion_tokens": st.none() | st.integers(1, 9),
            "min_tokens": st.none() | st.integers(0, 9),
            "stream": st.none() | st.booleans(),
            "stream_options": trees,
        },
    ),
)


@given(requests)
def test_two_phases_give_decode_the_original_and_its_handoff(raw: dict[str, Any]) -> None:
    """As an orchestrator does it: each body made, carried, read."""
    before = copy.deepcopy(raw)
    seen_by_prefill = decode_request(body("two_phase", PREFILL, raw))
    assert seen_by_prefill.stop.max_tokens == 1
    assert (seen_by_prefill.stop.min_tokens or 0) <= 1
    assert seen_by_prefill.decode_follows == (decode_request(raw).stop.max_tokens != 1)

    result = result_of(decode_chunk(answer("two_phase")))
    assert result == HANDOFF.result
    sent = body("two_phase", DECODE, raw, handoff=Handoff(TokenChunk([7]), result))

    assert {key: value for key, value in sent.items() if key not in KEYS_OF_PROTOCOLS} == before
    assert set(sent) - set(before) == {"phase_request", "kv_transfer_params"}
    seen_by_decode, as_it_came = decode_request(sent), decode_request(raw)
    assert seen_by_decode.prefill_result == result
    assert seen_by_decode.stop == as_it_came.stop
    assert not seen_by_decode.decode_follows


@given(requests, st.integers(0, 2**63 - 1), st.sampled_from(["tcp://a-b.c:1", "tcp://[fe80::1]:65535"]))
def test_both_bodies_of_bootstrap_are_the_original_and_one_room(
    raw: dict[str, Any], room: int, endpoint: str
) -> None:
    rendezvous = Rendezvous(room, [endpoint])
    for phase_request in (PREFILL, DECODE):
        sent = body("bootstrap", phase_request, raw, rendezvous=rendezvous)
        assert {key: value for key, value in sent.items() if key not in KEYS_OF_PROTOCOLS} == raw
        assert decode_request(sent).rendezvous == rendezvous
