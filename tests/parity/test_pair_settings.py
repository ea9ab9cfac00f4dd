"""Pairs of engines with different settings: each answer is that of one engine, or refused if no engine accepts it."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.conftest import Checkpoints
from tests.support.engine_pair import both_idle
from tests.support.handling import collect, request, tokens_of, until
from tests.support.stage_client import RecordingStageClient
from trtllm_disagg.config.worker_config import Role, WorkerConfig
from trtllm_disagg.engine.engine import Engine
from trtllm_disagg.engine.llm_api import load_api
from trtllm_disagg.errors import InvalidRequestError
from trtllm_disagg.handlers.drain import num_in_background
from trtllm_disagg.handlers.live_state import LiveState
from trtllm_disagg.handlers.services import build_generate
from trtllm_disagg.types import Generate, GenerateRequest

LONG, SHORT, STEP = 256, 128, 64


class Pair(NamedTuple):
    """One row of the matrix. What is not named is the same on both workers."""

    order: str
    #: Prefill's max_seq_len; decode's is LONG.
    length: int = LONG
    #: Of these roles each prompt has to fit into one step of STEP tokens.
    one_step: str = ""
    #: These roles decode with guides.
    guides: str = "prefill decode"
    #: Decode's batch.
    batch: int = 8
    #: Milliseconds of a lease.
    lease: int = 5000


VALUES: dict[str, tuple[Any, ...]] = {
    "order": ("prefill_first", "decode_first", "auto"),
    "length": (LONG, SHORT),
    "one_step": ("", "prefill", "decode"),
    "guides": ("prefill decode", "prefill", "decode"),
    "batch": (8, 1),
    "lease": (5000, 300),
}
#: Every two values of different settings are in at least one row.
PAIRS = (
    Pair("prefill_first", SHORT, "decode", "prefill decode", 1, 300),
    Pair("prefill_first", LONG, "prefill", "prefill", 1, 5000),
    Pair("prefill_first", SHORT, "", "decode", 8, 300),
    Pair("decode_first", SHORT, "", "prefill", 8, 5000),
    Pair("decode_first", LONG, "decode", "decode", 1, 5000),
    Pair("decode_first", SHORT, "prefill", "prefill decode", 8, 300),
    Pair("auto", LONG, "prefill", "decode", 8, 300),
    Pair("auto", LONG, "", "prefill decode", 1, 5000),
    Pair("auto", LONG, "decode", "prefill", 1, 300),
    Pair("auto", SHORT, "decode", "prefill decode", 8, 5000),
)


def test_every_two_values_are_in_one_row() -> None:
    for one, other in itertools.combinations(VALUES, 2):
        wanted = set(itertools.product(VALUES[one], VALUES[other]))
        assert wanted == {(getattr(row, one), getattr(row, other)) for row in PAIRS}, (one, other)


class Ask(NamedTuple):
    prompt: int
    max_tokens: int = 8
    is_guided: bool = False

    def request(self) -> GenerateRequest:
        options: dict[str, Any] = {"temperature": 0.0}
        if self.is_guided:
            options["guided_decoding"] = {"regex": "(a|b)*"}
        tokens = [2 + (i * 7 + i * i) % 250 for i in range(self.prompt)]
        return request(self.max_tokens, token_ids=tokens, sampling_options=options)


#: Around each limit: one step, prefill's length, decode's; an answer that passes prefill's length.
ASKED = (
    Ask(20),
    Ask(STEP + 1),
    Ask(SHORT - 1),
    Ask(SHORT),
    Ask(100, 100),
    Ask(LONG - 1),
    Ask(LONG),
    Ask(20, 8, True),
)


def takes(row: Pair, role: str, ask: Ask, *, prefills: bool) -> bool:
    length = row.length if role == "prefill" else LONG
    step = STEP if prefills and row.one_step == role else math.inf
    return ask.prompt < length and ask.prompt <= step and (not ask.is_guided or role in row.guides)


def is_answered(row: Pair, ask: Ask) -> bool:
    """By the pair, or by the worker that has the request: then its answer must not end earlier."""
    if takes(row, "prefill", ask, prefills=True) and takes(row, "decode", ask, prefills=False):
        return True
    first = "prefill" if row.order == "prefill_first" else "decode"
    ends_at = min(ask.max_tokens, LONG - ask.prompt)
    has_room = first == "decode" or ask.prompt + ends_at <= row.length
    return takes(row, first, ask, prefills=True) and has_room


@contextmanager
def opened(model: Path | str, row: Pair) -> Iterator[dict[Role, Engine]]:
    """On the embedded engine; with the name of a model, on recording ones."""
    is_recording = isinstance(model, str)
    guide = "xgrammar" if is_recording else "llguidance"
    engines = {}
    for number, role in enumerate((Role.PREFILL, Role.DECODE)):
        args = {
            "model": str(model),
            "kv_cache_config": {"max_tokens": 4096},
            "cache_transceiver_config": {"backend": "DEFAULT", "kv_transfer_timeout_ms": row.lease},
            "max_seq_len": row.length if role is Role.PREFILL else LONG,
            "max_batch_size": row.batch if role is Role.DECODE else 8,
            "max_num_tokens": STEP,
            "enable_chunked_prefill": row.one_step != role.value,
            "guided_decoding_backend": guide if role.value in row.guides else None,
        }
        engines[role] = Engine.open(load_api("recording" if is_recording else "embedded"), args, number)
    yield engines
    for engine in engines.values():
        engine.close()


def pair_of(engines: dict[Role, Engine], row: Pair) -> tuple[Generate, RecordingStageClient, LiveState]:
    first, second = (
        (Role.PREFILL, Role.DECODE) if row.order == "prefill_first" else (Role.DECODE, Role.PREFILL)
    )
    batch = {Role.PREFILL: 8, Role.DECODE: row.batch}

    def config(role: Role) -> WorkerConfig:
        return WorkerConfig(
            model="m",
            role=role,
            strategy=row.order,
            max_batch_size=batch[role],
            breaker_failures=1,
            max_tries=4,
        )

    serve = build_generate(config(second), engines[second], RecordingStageClient())
    client = RecordingStageClient(serve, description=msgspec.to_builtins(engines[second].facts))
    live = LiveState.of(config(first), 32)
    return build_generate(config(first), engines[first], client, live), client, live


async def right_answers(engine: Engine) -> dict[Ask, list[int]]:
    """What one engine answers that has no limit but LONG."""
    generate = build_generate(WorkerConfig(model="m", role=Role.AGG), engine, RecordingStageClient())
    asked = [ask for ask in ASKED if ask.prompt < LONG]
    return {ask: tokens_of(await collect(generate, ask.request())) for ask in asked}


async def examine(
    row: Pair, engines: dict[Role, Engine], right: dict[Ask, list[int]], asked: tuple[Ask, ...] = ASKED
) -> None:
    generate, client, live = pair_of(engines, row)
    for ask in asked:
        if is_answered(row, ask):
            # A recording engine does not end an answer at its max_seq_len.
            room = LONG - ask.prompt
            assert tokens_of(await collect(generate, ask.request()))[:room] == right[ask][:room], ask
        else:
            with pytest.raises(InvalidRequestError):
                await collect(generate, ask.request())
    # More than decode's batch has room for.
    many = await asyncio.gather(*(collect(generate, Ask(20).request()) for _ in range(6)))
    assert [tokens_of(chunks) for chunks in many] == [right[Ask(20)]] * 6
    assert live.breaker.times_opened == 0
    await client.idle()


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: "-".join(map(str, row)))
async def test_a_pair_of_different_engines_answers_as_one_engine_does(row: Pair) -> None:
    with opened("org/model", Pair("agg")) as whole:
        right = await right_answers(whole[Role.DECODE])
        with opened("org/model", row) as engines:
            await examine(row, engines, right)
            await until(lambda: not num_in_background())
            assert [engine.llm.held_contexts for engine in engines.values()] == [0, 0]


async def test_a_pair_of_different_embedded_engines_answers_as_one_engine_does(
    checkpoints: Checkpoints,
) -> None:
    """With real KV and leases that end while a request waits for decode's batch."""
    rows = [Pair(order, SHORT, "", "decode", 1, 300) for order in ("prefill_first", "decode_first")]
    with opened(checkpoints(), rows[0]) as engines:
        right = await right_answers(engines[Role.DECODE])
        for row in rows:
            await examine(row, engines, right, (Ask(20), Ask(SHORT), Ask(100, 100), Ask(20, 8, True)))
            await both_idle(engines)
