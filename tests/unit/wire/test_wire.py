"""Requests, chunks and handoffs between processes: nothing is lost, nothing breaks, errors name the key."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handling import raw_request
from trtllm_disagg.engines import embedded
from trtllm_disagg.engines.recording import llm as recording
from trtllm_disagg.errors import HandoffRefusedError, InvalidRequestError, PeerUnavailableError
from trtllm_disagg.handlers.peers import DECODE
from trtllm_disagg.types import (
    Handoff,
    OutputOptions,
    PrefillResult,
    PromptTokensDetails,
    SamplingOptions,
    StopConditions,
    TokenChunk,
    Usage,
    WireRequest,
)
from trtllm_disagg.wire.bodies import (
    decode_chunk,
    decode_disaggregated_params,
    decode_request,
    encode_chunk,
    encode_disaggregated_params,
    encode_request,
    names_a_sender,
)
from trtllm_disagg.wire.images import MEDIA_KEYS

APIS = [recording, embedded]


def over_the_wire(message: Any) -> Any:
    return json.loads(json.dumps(message, allow_nan=False))


# -- requests


def test_decoded_request_has_its_fields_or_their_defaults_and_the_raw_body() -> None:
    raw = raw_request(routing={"cache_salt": "s", "dp_rank": 1}, priority=1, annotations=["a"])
    read = decode_request(raw)
    assert read.raw is raw
    assert read.token_ids == [11, 12, 13]
    assert read.stop == StopConditions(max_tokens=5)
    assert read.sampling == SamplingOptions(temperature=0.5)
    assert read.output == OutputOptions()
    assert (read.cache_salt, read.priority, read.annotations) == ("s", 1.0, ("a",))
    assert read.prefill_result is None
    read = decode_request({"token_ids": [1]})
    assert (read.stop, read.sampling, read.output) == (StopConditions(), SamplingOptions(), OutputOptions())
    assert (read.cache_salt, read.priority, read.annotations, read.prefill_result) == (None, None, (), None)


def test_a_clients_priority_is_between_0_and_that_of_a_probe() -> None:
    def priority(number: int | None) -> float | None:
        return decode_request(raw_request(routing={"priority": number})).priority

    ordered = [priority(number) for number in (-(2**31), -1, 0, 1, 10, 2**31 - 1)]
    assert ordered == sorted({each for each in ordered if each is not None and 0 < each < 1})
    assert (priority(None), priority(0)) == (None, 0.5)
    assert decode_request(raw_request(routing={"priority": 5}, priority=1.0)).priority == 1.0


def test_options_at_the_top_of_a_request_count_unless_they_are_in_their_place() -> None:
    top = {"max_tokens": 3, "min_tokens": 2, "ignore_eos": True, "temperature": 0.5}
    read = decode_request({"token_ids": [1], **top})
    assert read.stop == StopConditions(max_tokens=3, min_tokens=2, ignore_eos=True)
    assert read.sampling == SamplingOptions(temperature=0.5)
    placed = {"stop_conditions": {"max_tokens": 9}, "sampling_options": {"temperature": 1.0}}
    read = decode_request({"token_ids": [1], **top, **placed})
    assert read.stop == StopConditions(max_tokens=9, min_tokens=2, ignore_eos=True)
    assert read.sampling == SamplingOptions(temperature=1.0)
    with pytest.raises(InvalidRequestError, match="stop_conditions"):
        decode_request({"token_ids": [1], **top, "stop_conditions": [5]})


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({"n": 2}, 1.0),
        ({"n": 2, "temperature": 0.0}, 0.0),
        ({"n": 2, "temperature": 0.5}, 0.5),
        ({"n": 2, "top_p": 0.9}, None),
        ({"n": 2, "top_k": 5}, None),
        ({"n": 1}, None),
        ({}, None),
    ],
)
def test_several_choices_are_drawn_unless_the_request_says_how(
    given: dict[str, Any], temperature: float | None
) -> None:
    """Greedy ones would be equal, and TensorRT-LLM refuses them."""
    read = decode_request(raw_request(sampling_options=given))
    assert read.sampling.temperature == temperature
    assert read.raw["sampling_options"].get("temperature") == temperature
    at_top = decode_request({"token_ids": [1], "temperature": 0.25, "sampling_options": {"n": 2}})
    assert at_top.sampling.temperature == 0.25


@pytest.mark.parametrize(
    ("guides", "named"),
    [
        ({"json": {}, "regex": "a"}, "guided_json, guided_regex: 2 guides; expected one"),
        ({"choice": ["a"], "json_object": True}, "guided_choice, guided_json_object: 2 guides"),
        ({"json_object": False, "regex": "a"}, None),
        ({"choice": [], "regex": "a", "json": None}, None),
    ],
)
def test_of_several_guides_none_is_dropped(guides: dict[str, Any], named: str | None) -> None:
    asked = raw_request(sampling_options={"guided_decoding": guides})
    if named is None:
        decode_request(asked)
        return
    with pytest.raises(InvalidRequestError, match=named):
        decode_request(asked)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_packed_tokens_are_unpacked_also_for_the_second_stage(kind: Any) -> None:
    raw = raw_request(token_ids=kind(b"\x01\0\0\0\xff\xff\0\0"))
    read = decode_request(raw)
    assert read.token_ids == [1, 65535]
    assert over_the_wire(encode_request(read, DECODE)) == raw | {
        "token_ids": [1, 65535],
        "phase_request": {"phase": "decode"},
        "errand": {"phase": "decode", "stage": "decode"},  # of 0.2
    }


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ("text", "object"),
        ({}, "token_ids"),
        ({"token_ids": []}, "the prompt is empty"),
        *(({"token_ids": ids}, r"\$\.token_ids") for ids in (b"12345", "text", [1.5])),
        ({"token_ids": [1, "x"]}, r"\$\.token_ids\[1\]"),
        *(({"token_ids": [1, token]}, "token_ids") for token in (2**63, 2**31, -1)),
        *(
            ({"token_ids": [1]} | {key: value}, named)
            for key, value, named in (
                ("stop_conditions", 5, r"\$\.stop_conditions"),
                ("stop_conditions", {"max_tokens": "9"}, r"\$\.stop_conditions\.max_tokens"),
                ("stop_conditions", {"max_tokens": -1}, "max_tokens=-1"),
                ("sampling_options", {"temperature": "hot"}, r"\$\.sampling_options\.temperature"),
                ("sampling_options", {"temperature": math.nan}, r"\$\.sampling_options\.temperature"),
                ("sampling_options", {"min_p": math.inf}, r"\$\.sampling_options\.min_p"),
                ("sampling_options", {"n": 0}, "n=0"),
                ("sampling_options", {"n": 129}, "n=129"),
                ("sampling_options", {"best_of": 3}, "best_of=3"),
                ("sampling_options", {"use_beam_search": True}, "use_beam_search"),
                ("output_options", {"logprobs": []}, r"\$\.output_options\.logprobs"),
                ("routing", {"cache_salt": 5}, r"\$\.routing\.cache_salt"),
                ("routing", {"dp_rank": -1}, r"\$\.routing\.dp_rank"),
                ("routing", {"dp_rank": 2**32}, r"\$\.routing\.dp_rank"),
                ("annotations", "a", r"\$\.annotations"),
                ("priority", "high", r"\$\.priority"),
            )
        ),
    ],
)
def test_a_bad_request_names_the_key(raw: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named) as caught:
        decode_request(raw)
    assert not isinstance(caught.value, HandoffRefusedError)


@pytest.mark.parametrize(
    "prefill_result",
    [
        *(5, "x", [], {}),
        {"disaggregated_params": None},
        {"disaggregated_params": {}, "prompt_tokens_details": 5},
    ],
)
def test_malformed_prefill_result_raises_handoff_refused(prefill_result: Any) -> None:
    with pytest.raises(HandoffRefusedError, match="prefill_result"):
        decode_request(raw_request(prefill_result=prefill_result))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
#: With what means media, which text workers refuse. hypothesis takes texts from the code, keys among them.
known_keys = {*raw_request(), *WireRequest.__struct_encode_fields__, "agent_context", *MEDIA_KEYS}
unknown = st.dictionaries(st.text().filter(lambda key: key not in known_keys), json_values, max_size=4)
params = st.dictionaries(st.text(), json_values, max_size=4)


@given(unknown, st.lists(st.integers(0, 2**31 - 1), min_size=1), params, st.none() | st.integers(0, 9))
def test_a_request_crosses_whole_and_unmutated(
    extra: dict[str, Any], tokens: list[int], handle: dict[str, Any], cached: int | None
) -> None:
    raw = raw_request(token_ids=tokens) | extra
    before = copy.deepcopy(raw)
    details = None if cached is None else PromptTokensDetails(cached)
    handoff = Handoff(TokenChunk([7]), PrefillResult(handle, details))
    sent = over_the_wire(encode_request(decode_request(raw).with_handoff(handoff), DECODE))
    assert raw == before
    again = decode_request(sent)
    assert again.prefill_result == handoff.result
    assert again.token_ids == tokens
    assert {key: sent[key] for key in before} == before


# -- chunks

finite = st.floats(allow_nan=False, allow_infinity=False)
chunks = st.builds(
    TokenChunk,
    token_ids=st.lists(st.integers(0, 2**31)),
    index=st.integers(0, 3),
    log_probs=st.none() | st.lists(finite),
    top_logprobs=st.none()
    | st.lists(st.lists(st.fixed_dictionaries({"rank": st.integers(), "logprob": finite}))),
    finish_reason=st.none() | st.sampled_from(["stop", "length", "cancelled"]),
    stop_reason=st.none() | st.integers() | st.text(),
    completion_usage=st.none() | st.builds(Usage.of, st.integers(0), st.integers(0), st.integers(0)),
    disaggregated_params=st.none() | params,
    engine_data=st.none() | params,
)


@given(chunks)
def test_a_chunk_crosses_whole(chunk: TokenChunk) -> None:
    assert decode_chunk(over_the_wire(encode_chunk(chunk))) == chunk
    assert encode_chunk(TokenChunk([5])) == {"token_ids": [5]}, "no empty keys"


@pytest.mark.parametrize(
    "raw", [None, 5, "x", [], {}, {"token_ids": None}, {"token_ids": [1], "finish_reason": {}}]
)
def test_an_unreadable_chunk_is_the_peers_fault(raw: Any) -> None:
    with pytest.raises(PeerUnavailableError, match="unreadable answer"):
        decode_chunk(raw)


# -- handoffs

READABLE = {"opaque_state": "a3Y=", "first_gen_tokens": [4710]}


def logprobs_of(api: Any) -> Any:
    logprob = st.builds(api.Logprob, logprob=finite, rank=st.none() | st.integers(1, 9))
    return st.lists(
        st.dictionaries(st.integers(0, 9), logprob, min_size=1, max_size=3), min_size=1, max_size=1
    )


@pytest.mark.parametrize("api", APIS)
@given(data=st.data())
def test_a_handoff_crosses_whole(api: Any, data: st.DataObject) -> None:
    given_params = api.DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2)),
        ctx_request_id=data.draw(st.integers(0, 2**62)),
        opaque_state=data.draw(st.binary(min_size=1)),
        draft_tokens=data.draw(st.none() | st.lists(st.integers(0, 9))),
        disagg_request_id=data.draw(st.none() | st.integers(0, 2**62)),
        ctx_dp_rank=data.draw(st.none() | st.integers(0, 7)),
        ctx_info_endpoint=data.draw(st.none() | st.text()),
        schedule_style=data.draw(st.none() | st.sampled_from(api.DisaggScheduleStyle)),
        first_gen_log_probs=data.draw(st.none() | logprobs_of(api)),
    )
    encoded = over_the_wire(encode_disaggregated_params(given_params))
    decoded = decode_disaggregated_params(PrefillResult(encoded), api.DisaggregatedParams, api.Logprob)
    given_params.request_type = "generation_only"
    assert decoded == given_params


def test_disaggregated_params_are_written_as_upstream_writes_them() -> None:
    encoded = encode_disaggregated_params(
        recording.DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=[4710],
            opaque_state=b"kv",
            first_gen_log_probs=[{4710: recording.Logprob(-2.25, 1)}],
            first_gen_logits=[object()],
        )
    )
    assert encoded == {
        "request_type": "context_only",
        "first_gen_tokens": [4710],
        "opaque_state": "a3Y=",
        "first_gen_log_probs": [[{"token_id": 4710, "logprob": -2.25, "rank": 1}]],
    }


@pytest.mark.parametrize(
    "given_probs", [[-0.5], [{4710: recording.Logprob(-0.1, 1), 9: recording.Logprob(-math.inf, 2)}]]
)
@pytest.mark.parametrize("over_json", [False, True])
def test_a_plain_first_logprob_and_an_alternative_that_a_guide_forbids_cross(
    given_probs: list[Any], over_json: bool
) -> None:
    params = recording.DisaggregatedParams(
        opaque_state=b"kv", first_gen_tokens=[4710], first_gen_log_probs=given_probs
    )
    encoded = encode_disaggregated_params(params)
    if over_json:  # Dynamo's serde_json writes null for a number that is not finite
        encoded = json.loads(json.dumps(encoded).replace("-Infinity", "null"))
    decoded = decode_disaggregated_params(
        PrefillResult(encoded), recording.DisaggregatedParams, recording.Logprob
    )
    assert decoded.first_gen_log_probs == given_probs


def test_keys_added_by_routers_are_dropped_from_a_handoff() -> None:
    encoded = READABLE | {"worker_id": 9, "_epd_metadata": {}}
    decoded = decode_disaggregated_params(
        PrefillResult(encoded), recording.DisaggregatedParams, recording.Logprob
    )
    assert decoded == recording.DisaggregatedParams(
        request_type="generation_only", opaque_state=b"kv", first_gen_tokens=[4710]
    )
    assert set(encoded) == {*READABLE, "worker_id", "_epd_metadata"}


@pytest.mark.parametrize(
    ("encoded", "named"),
    [
        ({}, "names no sender"),
        ({"opaque_state": ""}, "names no sender"),
        ({"opaque_state": None, "first_gen_tokens": [1]}, "names no sender"),
        ({"opaque_state": "not base64!"}, "not readable"),
        ({"opaque_state": "é"}, "not readable"),
        (READABLE | {"unheard_of": 1}, "unheard_of"),
        (READABLE | {"ctx_info_endpoint": "tcp://a:1"}, "ctx_info_endpoint without ctx_request_id"),
        (READABLE | {"first_gen_tokens": []}, "first_gen_tokens has no token"),
        ({"opaque_state": "a3Y="}, "first_gen_tokens has no token"),
        ({"opaque_state": "a3Y=", "first_gen_log_probs": [[{"logprob": 1}]]}, "token_id"),
        ({"opaque_state": "a3Y=", "first_gen_log_probs": 5}, "not readable"),
        ({"opaque_state": "a3Y=", "first_gen_log_probs": [[5]]}, "not readable"),
        # Bytes of a number are that many bytes: a worker could be made to take all memory.
        *(
            (READABLE | {field: value}, field)
            for field, value in (
                ("opaque_state", 10**12),
                ("opaque_state", [1]),
                ("first_gen_tokens", {"a": 1}),
                ("first_gen_tokens", 5),
                ("first_gen_tokens", ["a"]),
                ("first_gen_tokens", [True]),
                ("draft_tokens", [1.5]),
                ("draft_tokens", [2**31]),
                ("ctx_request_id", "7"),
                ("ctx_request_id", True),
                ("disagg_request_id", 2**63),
                ("ctx_dp_rank", "0"),
                ("ctx_info_endpoint", ["tcp://a", "tcp://b"]),
                ("ctx_info_endpoint", {"a": 1}),
                ("first_gen_log_probs", [[{"token_id": "a", "logprob": 0.5, "rank": 1}]]),
            )
        ),
    ],
)
def test_an_unreadable_handoff_is_refused(encoded: dict[str, Any], named: str) -> None:
    with pytest.raises(HandoffRefusedError, match=named):
        decode_disaggregated_params(PrefillResult(encoded), recording.DisaggregatedParams, recording.Logprob)


@given(params)
def test_random_handoff_is_decoded_or_refused(encoded: dict[str, Any]) -> None:
    try:
        decoded = decode_disaggregated_params(
            PrefillResult(READABLE | encoded), recording.DisaggregatedParams, recording.Logprob
        )
    except HandoffRefusedError:
        return
    assert decoded.request_type == "generation_only"


def test_opaque_state_or_context_endpoint_names_a_sender() -> None:
    assert names_a_sender({"opaque_state": "a3Y="})
    assert names_a_sender({"ctx_info_endpoint": ["tcp://a"]})
    assert not names_a_sender({"opaque_state": None, "ctx_request_id": 5})
