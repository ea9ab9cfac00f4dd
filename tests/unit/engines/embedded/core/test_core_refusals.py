"""A wrong, stale or foreign handoff costs its request an error, and other requests nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import Checkpoints
from tests.support.cores import Answer, Core
from tests.support.fake_transport import FakeTransport, Interrupted
from tests.support.meeting import wait_until
from trtllm_disagg.engines.embedded.ipc.messages import MadeHandoff
from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts
from trtllm_disagg.engines.embedded.kv_transfer.transports import TRANSPORTS
from trtllm_disagg.wire.kv_handle import KvHandle, decode_handle

BLOCK = 32
PROMPT = [5 + i % 11 for i in range(2 * BLOCK + 9)]
OTHER = [200 - i % 13 for i in range(2 * BLOCK + 9)]
REFUSED, UNAVAILABLE = "InvalidRequest", "Unavailable"


def backend(name: str) -> dict[str, Any]:
    return {"cache_transceiver_config": {"backend": name}}


@pytest.fixture(scope="module", params=tuple(TRANSPORTS))
def cores(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[tuple[Core, Core]]:
    pair = Core(checkpoints(), **backend(request.param)), Core(checkpoints(), **backend(request.param))
    yield pair
    for core in pair:
        core.close()


@pytest.fixture(scope="module")
def right_tokens(checkpoints: Checkpoints) -> list[int]:
    core = Core(checkpoints())
    tokens = core.generate(PROMPT)
    core.close()
    return tokens


@pytest.fixture
def prefill(cores: tuple[Core, Core]) -> Iterator[Core]:
    yield cores[0]
    cores[0].assert_idle()


@pytest.fixture
def decode(prefill: Core, cores: tuple[Core, Core], right_tokens: list[int]) -> Iterator[Core]:
    """Afterwards a good handoff still works, and the decode side's cache holds nothing wrong."""
    yield cores[1]
    handoff = prefill.prefill(PROMPT)
    assert pull(cores[1], handoff).tokens == right_tokens
    cores[1].assert_idle()


def pull(decode: Core, handoff: MadeHandoff, tokens: list[int] = PROMPT, **changes: Any) -> Answer:
    """What becomes of a handoff with a handle that was changed on the way."""
    handle = msgspec.structs.replace(decode_handle(handoff.opaque_state), **changes)
    return decode.run(decode.add_decode(tokens, handoff, opaque_state=handle.encode()))


def handle_of(handoff: MadeHandoff) -> KvHandle:
    return decode_handle(handoff.opaque_state)


def give_back(prefill: Core, handoff: MadeHandoff) -> None:
    """As the chain does when decode fails."""
    prefill.engine.abort(handoff.ctx_request_id)
    prefill.step()


def assert_refused(answer: Answer, reason: str, category: str = REFUSED) -> None:
    assert answer.error is not None
    assert reason in answer.error
    assert (answer.category, answer.tokens) == (category, [])


def test_two_uses_at_the_same_time_give_one_answer(
    prefill: Core, decode: Core, right_tokens: list[int]
) -> None:
    handoff = prefill.prefill(PROMPT)
    ids = [decode.add_decode(PROMPT, handoff) for _ in range(2)]
    decode.run(*ids)
    first, second = (decode.answers[i, 0] for i in ids)
    assert first.tokens == right_tokens
    assert_refused(second, "does not hold this handoff")


def test_handle_with_another_sender_is_refused(prefill: Core, decode: Core) -> None:
    handoff = prefill.prefill(PROMPT)
    assert_refused(pull(decode, handoff, sender="host-1-0"), "does not hold this handoff")
    give_back(prefill, handoff)


def has_expired(prefill: Core) -> bool:
    deadline = prefill.connector.sender.leases.next_deadline()
    return deadline is None or deadline <= time.monotonic()


def test_a_lease_that_ends_while_its_blocks_are_read_is_not_used(checkpoints: Checkpoints) -> None:
    fake, transfer = FakeTransport(), backend("SHARED_MEMORY")
    prefill = Core(checkpoints(), **transfer, transport=FakeTransport(), timeouts=KvTimeouts(transfer=0.1))
    decode = Core(checkpoints(), **transfer, transport=fake)
    fake.then("read", Interrupted(partial(wait_until, lambda: has_expired(prefill))))
    assert_refused(pull(decode, prefill.prefill(PROMPT)), "ended before the KV was read", UNAVAILABLE)
    assert fake.count("read") == 1
    for core in (prefill, decode):
        core.assert_idle()
        core.close()


def test_blocks_of_another_prompt_are_never_used(prefill: Core, decode: Core) -> None:
    mine, theirs = prefill.prefill(PROMPT), prefill.prefill(OTHER)
    answer = pull(decode, mine, blocks=handle_of(theirs).blocks)
    assert_refused(answer, "does not hold this handoff")
    answer = pull(decode, mine, lease=handle_of(theirs).lease)
    assert_refused(answer, "does not hold this handoff")
    for handoff in (mine, theirs):
        give_back(prefill, handoff)


def test_a_handle_with_another_prompt_is_refused_before_anything_is_read(prefill: Core, decode: Core) -> None:
    handoff = prefill.prefill(PROMPT)
    assert_refused(pull(decode, handoff, OTHER), "belongs to another prompt")
    answer = decode.run(decode.add_decode(PROMPT, handoff, cache_salt="tenant"))
    assert_refused(answer, "belongs to another prompt")
    give_back(prefill, handoff)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": b"?" * 16}, "KV layout is not"),
        ({"version": 2}, "version 2; this worker speaks version 1"),
        ({"num_tokens": 1}, "for 1 tokens"),
        ({"blocks": [0]}, "holds 1 blocks"),
        ({"blocks": [0, 1, 2, 3]}, "holds 4 blocks"),
        ({"blocks": [0, 1, 1_000_000]}, "names block 1000000; the peer has 32"),
        ({"layout": b"?" * 16, "blocks": [0]}, "KV layout is not"),
        ({"endpoint": "http://127.0.0.1:1"}, "expected unix:///PATH"),
        ({"endpoint": "tcp://127.0.0.1:9"}, "expected unix:///PATH"),
    ],
)
def test_inconsistent_handle_is_refused_with_the_reason(
    prefill: Core, decode: Core, changes: dict[str, Any], reason: str
) -> None:
    handoff = prefill.prefill(PROMPT)
    assert_refused(pull(decode, handoff, **changes), reason)
    give_back(prefill, handoff)


@pytest.mark.parametrize("endpoint", ["unix:///run/docker.sock", "unix:///no/where/kv-1-1-00000000"])
def test_an_endpoint_without_listener_means_unavailable(prefill: Core, decode: Core, endpoint: str) -> None:
    handoff = prefill.prefill(PROMPT)
    assert_refused(pull(decode, handoff, endpoint=endpoint), "control channel", UNAVAILABLE)
    give_back(prefill, handoff)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.sets(st.tuples(st.integers(0, 999), st.integers(0, 7)), min_size=1, max_size=2))
def test_handle_with_flipped_bits_gives_no_wrong_answer(
    prefill: Core, decode: Core, flips: set[tuple[int, int]]
) -> None:
    mine, other = prefill.prefill(PROMPT), prefill.prefill(OTHER)
    state = bytearray(mine.opaque_state)
    for place, bit in {(place % len(state), bit) for place, bit in flips}:
        state[place] ^= 1 << bit
    try:
        answer = decode.run(decode.add_decode(PROMPT, mine, opaque_state=bytes(state)))
        assert answer.category in (REFUSED, UNAVAILABLE), "every field is confirmed by the sender"
        assert answer.tokens == []
        assert "Error" not in (answer.error or ""), "an exception's name is no reason"
    finally:
        for handoff in (mine, other):
            give_back(prefill, handoff)
    assert prefill.connector.num_leases == 0
