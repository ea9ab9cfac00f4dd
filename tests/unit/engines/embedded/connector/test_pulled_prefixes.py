"""A prefill pulls the start of its prompt out of a decode engine's cache, or computes it: same bits, no lost block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Checkpoints
from tests.support.cores import Answer, Core
from tests.support.fake_transport import Fails, FakeTransport, Outcome, TakesTooLong, WaitsFor
from tests.support.meeting import Duo
from tests.unit.engines.embedded.core.test_core_handoff import prompt
from trtllm_disagg.engines.embedded.ipc.messages import ReceivedHandoff, SamplingSpec
from trtllm_disagg.engines.embedded.kv_transfer.base import KvTimeouts
from trtllm_disagg.errors import KvTransferError

BLOCK = 32
#: Decode has the first two blocks of it.
PROMPT = prompt(3 * BLOCK + 5)
GREEDY = SamplingSpec(max_tokens=1, logprobs=2)


@pytest.fixture
def fake() -> FakeTransport:
    """Prefill's."""
    return FakeTransport()


@pytest.fixture
def duo(checkpoints: Checkpoints, fake: FakeTransport) -> Iterator[Duo]:
    backend = {"cache_transceiver_config": {"backend": "SHARED_MEMORY"}, "timeouts": KvTimeouts(ask=0.01)}
    prefill, decode = (Core(checkpoints(), **backend, transport=each) for each in (fake, FakeTransport()))
    duo = Duo(prefill, decode)
    duo.decode.generate(PROMPT[: 2 * BLOCK], 1)
    yield duo
    duo.assert_idle()
    duo.close()


def cached(core: Core, tokens: list[int]) -> Answer:
    return core.run(core.add(tokens, 1, request_type="cached_only"))


def start_pulling(duo: Duo, sampling: SamplingSpec = GREEDY) -> int:
    handoff = cached(duo.decode, PROMPT).handoff
    assert handoff is not None
    assert handoff.first_gen_tokens == []
    received = ReceivedHandoff(handoff.opaque_state, [])
    return duo.prefill.add(PROMPT, sampling=sampling, request_type="context_only", handoff=received)


def released(core: Core, request_id: int) -> None:
    core.engine.abort(request_id)
    core.step()


@pytest.mark.parametrize(
    ("outcome", "num_pulled"),
    [(None, 2 * BLOCK), (Fails(KvTransferError("scripted")), 0), (late := TakesTooLong(), 0)],
    ids=["arrives", "fails", "may land later"],
)
def test_what_does_not_arrive_is_computed(
    duo: Duo, fake: FakeTransport, outcome: Outcome | None, num_pulled: int
) -> None:
    elsewhere: dict[str, Any] = {"sampling": GREEDY, "request_type": "context_only", "cache_salt": "right"}
    right = duo.decode.run(request := duo.decode.add(PROMPT, **elsewhere))
    released(duo.decode, request)
    if outcome is not None:
        fake.then("read", outcome)

    answer = duo.prefill.run(request := start_pulling(duo))

    assert (answer.tokens, answer.logprobs, answer.error) == (right.tokens, right.logprobs, None)
    assert answer.cached_tokens == num_pulled
    assert duo.prefill.stats[-1]["totals"]["prefillTokens"] == len(PROMPT) - num_pulled
    assert fake.count("read") == 1
    assert duo.prefill.engine.blocks.num_quarantined == (2 if outcome is late else 0)
    late.ended.set()
    released(duo.prefill, request)
    duo.run_until(lambda: not duo.prefill.engine.blocks.num_quarantined)


def test_a_client_that_leaves_while_its_prompt_is_pulled_frees_both(duo: Duo, fake: FakeTransport) -> None:
    fake.then("read", reading := WaitsFor())
    request = start_pulling(duo)
    duo.prefill.step()
    assert reading.begun.wait(reading.seconds)
    duo.prefill.engine.abort(request)
    duo.prefill.step()
    reading.go.set()
    assert duo.prefill.run(request).finish_reason == "cancelled"


def test_a_prompt_with_logprobs_is_computed_and_lets_the_lease_go(duo: Duo, fake: FakeTransport) -> None:
    request = start_pulling(duo, SamplingSpec(max_tokens=1, prompt_logprobs=0))
    assert len(duo.prefill.run(request).prompt_logprobs) == len(PROMPT)
    assert fake.count("read") == 0
    released(duo.prefill, request)


def test_a_prompt_that_was_pulled_before_is_not_read_again(duo: Duo, fake: FakeTransport) -> None:
    for _ in range(2):
        request = start_pulling(duo)
        duo.prefill.run(request)
        released(duo.prefill, request)
    assert fake.count("read") == 1


def test_leased_blocks_stay_in_the_cache_while_the_pool_is_full(duo: Duo) -> None:
    """As many blocks as the pool has beside them are written meanwhile."""
    request = start_pulling(duo)
    pool = duo.decode.engine.blocks
    for salt in range(3, 3 + pool.num_blocks // 10 + 1):
        duo.decode.generate(prompt(10 * BLOCK, salt), 1)
    assert duo.prefill.run(request).cached_tokens == 2 * BLOCK
    released(duo.prefill, request)
    duo.decode.settle()
    assert len(pool.match(pool.prompt_keys(PROMPT, b""))) == 2


@pytest.mark.parametrize("tokens", [prompt(70, salt=9), PROMPT[:BLOCK], PROMPT[:5]])
def test_a_prompt_of_which_no_block_is_known_but_its_last_tokens_has_no_handoff(
    duo: Duo, tokens: list[int]
) -> None:
    answer = cached(duo.decode, tokens)
    assert (answer.finish_reason, answer.handoff, answer.error) == ("length", None, None)
