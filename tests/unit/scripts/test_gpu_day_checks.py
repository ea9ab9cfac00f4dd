"""The checks of a day with GPUs: each passes where all is right, and fails of a fault that is planted."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scripts import gpu_day
from scripts.gpu_day import CHECKS, FAIL, NOT_RUN, PASS, PROMPTS, Check, Day, Row, kill, rows, tried
from scripts.gpu_site import (
    AGG,
    ANSWER_TOKENS,
    ORDERS,
    PAIR,
    RECORDING,
    TENSORRT_LLM,
    UPSTREAM,
    Answer,
    FailedError,
    RefusedError,
    Site,
)
from trtllm_disagg.tools.up.run_dir import ProcessRecord

ORDER = "decode_first"
CITY = '{"city": "Rome", "people": 3}'
RIGHT = Answer(
    tokens=tuple(range(ANSWER_TOKENS)),
    gaps=(1.0,) * ANSWER_TOKENS,
    cached=64,
    ttft=0.01,
    has_end=True,
    engine_data={
        "disagg": {"strategy": ORDER},
        "prompt_logprobs": [None, *({"7": {"logprob": -0.5}} for _ in range(9))],
    },
)
MESSAGE = {"content": CITY, "tool_calls": [{"function": {"arguments": CITY}}]}
WRONG = replace(RIGHT, tokens=(*RIGHT.tokens[:50], 9999, *RIGHT.tokens[51:]))


@pytest.fixture(autouse=True)
def _short_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 20))


@dataclass
class Faulty(Site):
    """Serves nothing: answers what it is told. `ended` are workers that get SIGKILL."""

    url: str = ""
    model: str = ""
    order: str = ORDER
    answer: Callable[[int], Answer] = lambda asked: RIGHT
    reply: Any = field(default_factory=lambda: {"choices": [{"message": MESSAGE}] * 2})
    load: Callable[[int], float] = lambda asked: 0.0
    num_decode: int = 2
    asked: int = 0
    looked: int = 0
    said: list[str] = field(default_factory=list)

    def ask(
        self, prompt: str, on_first: Callable[[], object] = int, leave_after: int = 0, **more: Any
    ) -> Answer:
        self.asked += 1
        answer = self.answer(self.asked)
        on_first()
        return replace(answer, tokens=answer.tokens[: more.get("max_tokens", ANSWER_TOKENS)])

    def post(self, path: str, **body: Any) -> Any:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply

    def workers(self, role: str = "") -> list[ProcessRecord]:
        roles = ["prefill"] + ["decode"] * self.num_decode
        everyone = [
            ProcessRecord(f"{each}-{n}", each, 10_000 + self.looked * 10 + n, {}, "", "ready", 0)
            for n, each in enumerate(roles)
        ]
        return [each for each in everyone if role in ("", each.role)]

    def gauge(self, worker: ProcessRecord, *names: str) -> float:
        self.looked += 1
        return self.load(self.looked)

    def command(self, *words: str) -> None:
        self.said.append(words[0])


def day_with_answers(engine: str = TENSORRT_LLM) -> Day:
    day = Day(engine, load_seconds=1.0, turns=["one", "two", "three"])
    day.answers = dict.fromkeys(PROMPTS, RIGHT)
    day.answers |= {turn: replace(RIGHT, tokens=RIGHT.tokens[:60]) for turn in day.turns}
    return day


def check_named(name: str) -> Check:
    return next(check for check in CHECKS if check.name in (name, f"{ORDER}: {name}"))


def alternating(first: Answer, then: Answer, after: int) -> Callable[[int], Answer]:
    return lambda asked: first if asked <= after else then


REFUSED = RefusedError(400, "guided_decoding_backend is not set")
CUT = replace(RIGHT, tokens=RIGHT.tokens[:9], has_end=False)
FELL_BACK = replace(RIGHT, engine_data={"disagg": {"strategy": ORDER, "fallbacks": ["local"]}})
LOCAL = replace(RIGHT, engine_data={"disagg": {"strategy": "local"}})
UNCACHED = replace(RIGHT, cached=0)
FEWER = replace(RIGHT, engine_data={"prompt_logprobs": [{"7": {"logprob": -0.5}}]})
OTHERS = replace(
    RIGHT, engine_data={"prompt_logprobs": [None, *({"7": {"logprob": -5.0}} for _ in range(9))]}
)


@pytest.mark.parametrize(
    ("name", "fault", "seen"),
    [
        ("agg: the same answer twice", {"answer": alternating(RIGHT, WRONG, 4)}, "token 50 of 200 differs"),
        ("agg: the same answer twice", {"answer": lambda _: CUT}, "answers of {9} tokens"),
        (
            "tokens as agg's",
            {"answer": lambda _: WRONG},
            "token 50 of 200 differs, where the next likely one",
        ),
        ("tokens as agg's", {"answer": lambda _: CUT}, "an answer has no end; it has 9 tokens"),
        ("tokens as agg's", {"answer": lambda _: FELL_BACK}, "'fallbacks': ['local']"),
        ("tokens as agg's", {"answer": lambda _: LOCAL}, "served as {'strategy': 'local'}"),
        ("JSON of a schema", {"reply": REFUSED}, "400: guided_decoding_backend"),
        ("JSON of a schema", {"reply": {"choices": [{"message": {"content": "Rome"}}]}}, "no JSON"),
        ("a forced tool", {"reply": {"choices": [{"message": {"content": "Rome"}}]}}, "no call of the tool"),
        ("prompt_logprobs, twice", {"answer": alternating(RIGHT, FEWER, 1)}, "9 entries, the second time 1"),
        ("prompt_logprobs, twice", {"answer": alternating(RIGHT, OTHERS, 1)}, "4.50 away"),
        ("prompt_logprobs, twice", {"answer": lambda _: replace(RIGHT, engine_data={})}, "no entries"),
        ("clients leave beside others", {"answer": alternating(RIGHT, CUT, 2)}, "an answer has no end"),
        ("n: 2", {"reply": {"choices": [{}]}}, "1 choices"),
        ("n: 2", {"reply": RefusedError(500, "oh")}, "500: oh"),
        ("cancel", {"load": lambda _: 1.0}, "not after 1 s"),
        (
            "the next turn",
            {"answer": lambda _: UNCACHED},
            "no token of an earlier turn was cached: [0, 0, 0]",
        ),
        ("the next turn", {"answer": alternating(RIGHT, WRONG, 1)}, "token 50 of 60 differs"),
        ("flip there and back", {"answer": alternating(RIGHT, UNCACHED, 24)}, "hits 12 before and 0 after"),
        ("flip there and back", {"load": lambda looked: float(looked < 3)}, "most blocks 1 and 0"),
        (
            "kill -9 of prefill",
            {"answer": lambda asked: CUT if asked == 3 else RIGHT},
            "an answer has no end; it has 9 tokens",
        ),
    ],
)
def test_a_planted_fault_fails_its_check(
    name: str, fault: dict[str, Any], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_day, "SECONDS", 1.0)
    site, check = Faulty(**fault), check_named(name)
    site.looked = 1 if name.startswith("flip") else 0
    monkeypatch.setattr(os, "kill", lambda pid, number: setattr(site, "looked", site.looked + 1))
    row = tried(check, site, day_with_answers())
    assert (row.verdict, row.name) == (FAIL, check.name)
    assert seen in row.seen


@pytest.mark.parametrize(
    "check", [check for check in CHECKS if ORDER in check.name], ids=lambda check: check.name
)
def test_each_check_passes_where_all_is_right(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Faulty()
    killed: list[tuple[int, int]] = []

    def end(pid: int, number: int) -> None:
        killed.append((pid, number))
        site.looked += 1

    monkeypatch.setattr(os, "kill", end)
    row = tried(check, site, day_with_answers())
    assert row.verdict == PASS, row
    assert [number for _, number in killed] == [signal.SIGKILL] * check.name.count("kill")
    assert site.said == ["flip", "flip"] * check.name.count("flip")


def test_tokens_may_part_at_a_tie_only() -> None:
    tie = replace(WRONG, gaps=RIGHT.gaps)
    day = day_with_answers()
    close = replace(RIGHT, gaps=(*RIGHT.gaps[:50], 0.01, *RIGHT.gaps[51:]))
    day.answers = dict.fromkeys(PROMPTS, close)
    row = tried(check_named("tokens as agg's"), Faulty(answer=lambda _: tie), day)
    assert (row.verdict, row.seen[:11]) == (PASS, "0 of 4 equal"[:11])
    assert "at a tie (0.010)" in row.seen


@pytest.mark.parametrize(("num_decode", "verdict"), [(1, PASS), (2, FAIL)])
def test_answers_may_be_cut_with_the_only_first_stage_and_never_be_wrong(
    num_decode: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(answer: Answer) -> Row:
        site = Faulty(answer=alternating(answer, RIGHT, 4), num_decode=num_decode)
        monkeypatch.setattr(os, "kill", lambda pid, number: setattr(site, "looked", site.looked + 1))
        return tried(Check("kill", PAIR, kill("decode")), site, day_with_answers())

    assert row(CUT).verdict == verdict
    assert row(replace(CUT, tokens=(1, 2, 3))).verdict == FAIL


def test_agg_has_to_be_as_fast_as_upstream() -> None:
    day, check = day_with_answers(), check_named("agg: speed")
    day.speeds[UPSTREAM] = 0.01, 1.0
    assert tried(check, Faulty(order=AGG), day).verdict == PASS
    late = Faulty(order=AGG, answer=lambda _: replace(RIGHT, ttft=0.02))
    assert "2.00 and " in tried(check, late, day).seen
    assert tried(check, late, day).verdict == FAIL
    day.speeds[UPSTREAM] = 0.01, math.inf
    assert tried(check, Faulty(order=AGG), day).verdict == FAIL


def test_what_an_engine_cannot_show_is_not_run() -> None:
    day = day_with_answers(RECORDING)
    assert [
        check.name for check in CHECKS if tried(check, Faulty(reply=REFUSED), day).verdict == NOT_RUN
    ] == [
        "MPI starts a rank",
        *(
            f"{order}: {name}"
            for order in ORDERS
            for name in (
                "JSON of a schema",
                "a forced tool",
                "prompt_logprobs, twice",
                "n: 2",
                "flip there and back",
            )
        ),
        "router: JSON of a schema",
    ]


def test_a_deployment_that_does_not_start_fails_and_the_others_are_tried() -> None:
    @contextmanager
    def start(where: str) -> Iterator[Site]:
        if where == PAIR:
            raise FailedError("CUDA out of memory")
        yield Faulty(order=where)

    # On this engine no MPI is tried, which would cost a minute.
    seen = list(rows(day_with_answers("embedded"), start))
    assert [row for row in seen if row.name.startswith(PAIR)] == [
        Row(FAIL, "pair: starts and stops", "CUDA out of memory")
    ]
    assert {row.verdict for row in seen if row.name.startswith(ORDERS)} == {NOT_RUN}
    assert any(row.name == "router: speed" and row.verdict == PASS for row in seen)


def test_a_stream_becomes_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {
            "choices": [{"text": "a", "logprobs": {"top_logprobs": [{"a": -1.0, "b": -3.5}]}}],
            "nvext": {"completion_token_ids": [5]},
        },
        {
            "choices": [{"text": "b", "finish_reason": "length"}],
            "nvext": {"completion_token_ids": [6, 7], "engine_data": {"disagg": {}}},
        },
        {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}},
    ]

    @contextmanager
    def opened(self: Site, path: str, body: Any, seconds: float = 1.0) -> Iterator[list[bytes]]:
        yield [
            b": ping\n",
            *(b"data: " + json.dumps(event).encode() + b"\n" for event in events),
            b"data: [DONE]\n",
        ]

    monkeypatch.setattr(Site, "_open", opened)
    begun: list[int] = []
    answer = Site("", "").ask("hello", on_first=lambda: begun.append(1))
    assert (answer.tokens, answer.text, answer.gaps, answer.cached) == ((5, 6, 7), "ab", (2.5,), 32)
    assert (answer.has_end, begun, answer.ttft < 60) == (True, [1], True)
    assert Site("", "").ask("hello", leave_after=1).tokens == (5,)
