"""What travels in opaque_state, and what two pools must have in common."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_disagg.engines.embedded.kv_transfer.base import KvLayout, prompt_digest
from trtllm_disagg.errors import HandoffRefusedError
from trtllm_disagg.wire.kv_handle import (
    MAX_BYTES,
    VERSION,
    KvHandle,
    decode_handle,
    join_endpoint,
    split_endpoint,
)

HANDLE = KvHandle(
    version=VERSION,
    sender="host-1-abc",
    endpoint="unix:///tmp/trtllm-disagg-0/kv-1-1-0a",
    lease=b"l" * 16,
    layout=b"y" * 16,
    prompt=b"p" * 16,
    num_tokens=70,
    blocks=[4, 5, 9],
    seed=2**63 - 1,
    cached_tokens=64,
)
LAYOUT = KvLayout("model-a", 4, 32, 2, 16, "float32")


def test_a_handle_survives_the_wire() -> None:
    assert decode_handle(HANDLE.encode()) == HANDLE


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": "host-2-abc"},
        {"endpoint": "unix:///tmp/trtllm-disagg-0/kv-1-1-0b"},
        {"lease": b"m" * 16},
        {"layout": b"z" * 16},
        {"prompt": b"q" * 16},
        {"num_tokens": 71},
        {"blocks": [4, 5, 8]},
        {"blocks": [5, 4, 9]},
        {"seed": 0},
        {"cached_tokens": 0},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_digest_covers_every_field(changes: dict[str, Any]) -> None:
    assert msgspec.structs.replace(HANDLE, **changes).digest() != HANDLE.digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": VERSION + 1},
        {"sender": ""},
        {"sender": "x" * 129},
        {"lease": b"short"},
        {"num_tokens": 0},
        {"blocks": [-1]},
        {"blocks": [2**31]},
        {"seed": -1},
        {"endpoint": "tcp://127.0.0.1:1"},
        {"endpoint": "unix://name"},
        {"endpoint": "unix://@name:1"},
        {"endpoint": "unix:///tmp/soc ket"},
        {"endpoint": "unix:///tmp//socket"},
        {"endpoint": "unix:///tmp/socket\n"},
        {"endpoint": "unix:///tmp/\0"},
        {"endpoint": "unix://" + "/x" * 17},
        {"endpoint": "unix:///" + "x" * 250},
    ],
    ids=repr,
)
def test_a_field_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(HandoffRefusedError, match="handoff"):
        decode_handle(msgspec.structs.replace(HANDLE, **changes).encode())


def test_unknown_fields_and_huge_messages_are_refused() -> None:
    fields = msgspec.structs.asdict(HANDLE)
    with pytest.raises(HandoffRefusedError, match="unknown field"):
        decode_handle(msgspec.msgpack.encode(fields | {"extra": 1}))
    with pytest.raises(HandoffRefusedError, match="at most"):
        decode_handle(b"x" * (MAX_BYTES + 1))


def test_layout_mismatch_is_refused_with_every_difference() -> None:
    LAYOUT.require_same(KvLayout("model-a", 4, 32, 2, 16, "float32"))
    with pytest.raises(HandoffRefusedError) as refused:
        LAYOUT.require_same(KvLayout("model-b", 4, 16, 2, 16, "float32"))
    assert str(refused.value).endswith(
        "model: prefill 'model-b', decode 'model-a'; tokens_per_block: prefill 16, decode 32"
    )


def test_every_field_of_a_layout_is_in_its_fingerprint() -> None:
    for field in msgspec.structs.fields(LAYOUT):
        value = getattr(LAYOUT, field.name)
        other = value + ("?" if isinstance(value, str) else 1)
        assert msgspec.structs.replace(LAYOUT, **{field.name: other}).fingerprint() != LAYOUT.fingerprint()


@given(st.lists(st.integers(0, 2**32 - 1)), st.text(max_size=8))
def test_a_prompts_digest_is_that_of_its_ids_in_four_bytes_each_the_lowest_first(
    prompt: list[int], salt: str
) -> None:
    written = hashlib.blake2b(salt.encode()).digest() + b"".join(id.to_bytes(4, "little") for id in prompt)
    assert prompt_digest(prompt, salt) == hashlib.blake2b(written, digest_size=16).digest()


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_has_no_four_bytes_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        prompt_digest([1, token], "")


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("prefill_1", 80),
        ("kv_net.prefill-0", 65535),
        ("10.0.0.1", 1),
        ("fe80::1", 4711),
        ("/tmp/a/kv-1-1-0a", 1),
    ],
)
def test_hosts_that_docker_and_kubernetes_name_and_socket_files_are_endpoints(host: str, port: int) -> None:
    assert split_endpoint(join_endpoint(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://us er@host:1",
        "udp://h:1",
        "tcp://h:1\n",
        "tcp://@n:1",
    ],
)
def test_text_that_is_no_endpoint_is_noticed(text: str) -> None:
    assert split_endpoint(text) is None
