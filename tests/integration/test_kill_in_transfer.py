"""kill -9 of an engine in the middle of a KV transfer: the other one has an error, all of its blocks, and goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from tests.conftest import Checkpoints
from tests.support.engine_process import EngineProcess, Kill
from tests.unit.engines.embedded.core.test_core_handoff import prompt

#: Of a lease, and of a read or a write: how long a peer's death may cost blocks.
SECONDS = 2.0
LENGTH = 410
_numbers = itertools.count(1)

Start = Callable[[], EngineProcess]


@pytest.fixture(scope="module", params=["SHARED_MEMORY", "NIXL"])
def start(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Start]:
    made: list[EngineProcess] = []

    def start_one() -> EngineProcess:
        backend = {"backend": request.param, "kv_transfer_timeout_ms": int(SECONDS * 1000)}
        made.append(
            EngineProcess(
                checkpoints(),
                cache_transceiver_config=backend,
                enable_chunked_prefill=True,
                max_num_tokens=128,
            )
        )
        return made[-1]

    yield start_one
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def prefill(start: Start) -> EngineProcess:
    """Survives."""
    return start()


@pytest.fixture(scope="module")
def decode(start: Start) -> EngineProcess:
    """Survives."""
    return start()


def new_prompt() -> list[int]:
    """No cache knows it."""
    return prompt(LENGTH, salt=next(_numbers))


def survives(engine: EngineProcess, prefill: EngineProcess, decode: EngineProcess) -> None:
    """Not a block is lost, and the next requests are answered, both ways."""
    assert engine.ask("settle") == {"lost": 0}
    tokens = new_prompt()
    handoff = prefill.ask("prefill", prompt=tokens)
    pulled = decode.ask("decode", prompt=tokens, **handoff)
    assert pulled["error"] is None
    assert pulled["tokens"] == prefill.ask("agg", prompt=tokens)["tokens"]
    pushed = push(prefill, decode, new_prompt())
    assert (pushed["error"], len(pushed["tokens"])) == (None, 8)
    assert prefill.wait()["error"] is None
    for each in (prefill, decode):
        assert each.ask("settle") == {"lost": 0}


def push(
    prefill: EngineProcess, decode: EngineProcess, tokens: list[int], kill: Kill | None = None
) -> dict[str, Any]:
    """Decode's answer; `kill` is armed in prefill, which has still to answer."""
    request = (1 << 41) + next(_numbers)
    prefill.start("push", prompt=tokens, request=request, kill=kill)
    decode.start("expect", prompt=tokens, request=request, endpoint=prefill.endpoint)
    return decode.wait()


@pytest.mark.parametrize("when", ["half", "after"])
def test_death_of_the_sender_during_a_read_fails_the_decode_as_unavailable(
    when: Literal["half", "after"], start: Start, prefill: EngineProcess, decode: EngineProcess
) -> None:
    doomed, tokens = start(), new_prompt()
    handoff = doomed.ask("prefill", prompt=tokens)

    answer = decode.ask("decode", prompt=tokens, kill=Kill(when, doomed.pid), **handoff)

    assert doomed.has_died()
    assert (answer["category"], answer["tokens"]) == ("Unavailable", []), answer
    survives(decode, prefill, decode)


def test_a_reader_that_dies_in_the_middle_harms_no_other_engine(
    start: Start, prefill: EngineProcess, decode: EngineProcess
) -> None:
    doomed, tokens = start(), new_prompt()
    handoff = prefill.ask("prefill", prompt=tokens)

    doomed.start("decode", prompt=tokens, kill=Kill("half"), **handoff)

    assert doomed.has_died()
    survives(prefill, prefill, decode)


def test_a_writer_that_dies_in_the_middle_harms_no_other_engine(
    start: Start, prefill: EngineProcess, decode: EngineProcess
) -> None:
    doomed = start()

    answer = push(doomed, decode, new_prompt(), Kill("half"))

    assert doomed.has_died()
    assert (answer["category"], answer["tokens"]) == ("Unavailable", []), answer
    survives(decode, prefill, decode)


@pytest.mark.parametrize("known", [0, 256], ids=["written to", "read from"])
def test_death_of_decode_during_a_push_fails_the_prefill(
    known: int, start: Start, prefill: EngineProcess, decode: EngineProcess
) -> None:
    """Prefill writes what decode lacks, after it has read what decode knows."""
    doomed, tokens = start(), new_prompt()
    if known:
        doomed.ask("agg", prompt=tokens[:known])
    request = (1 << 41) + next(_numbers)
    doomed.start("expect", prompt=tokens, request=request, endpoint=prefill.endpoint)

    answer = prefill.ask("push", prompt=tokens, request=request, kill=Kill("half", doomed.pid))

    assert doomed.has_died()
    assert answer["category"] == "Unavailable", answer
    survives(prefill, prefill, decode)
