"""benchmarks/overhead.py: does the client read streams right, does every number reach its place, does it run?"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from benchmarks import overhead
from benchmarks.http_client import BadAnswerError, Client, StreamedAnswer, completion_request
from benchmarks.overhead import BASELINE, Load, cpu_quantities, cpu_seconds, section_of
from benchmarks.report import TOO_SHORT, Rounds, figures_of, print_report, wide_console
from trtllm_disagg.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (*parts, b""))


STREAM = HEAD + chunked(event("ab"), event("c")[:9], event("c")[9:], b"data: [DONE]\n\n")


# -- the client


@asynccontextmanager
async def serving(*answers: bytes, pause: float = 0.0) -> AsyncIterator[Client]:
    """A client of a server with an answer for each request; it writes them in pieces, and then hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError):  # the client has gone
            for answer in answers:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                for at in range(0, len(answer), 7):
                    writer.write(answer[at : at + 7])
                    await writer.drain()
                    await asyncio.sleep(0)
            await asyncio.sleep(pause)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, Client.to(url) as client:
        yield client
    await asyncio.sleep(0.01)  # `serve` notices that the client has gone


REQUEST = completion_request("m", [1], 3)


async def test_a_stream_in_pieces_is_read_and_its_connection_is_used_again() -> None:
    async with serving(STREAM, STREAM) as client:
        for answer in await client.ask_all([REQUEST] * 2):
            assert answer.text() == "abc"
            assert answer.asked < answer.first <= answer.ended


async def test_a_refused_request_is_an_error_with_its_reason() -> None:
    refused = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\nnot ready"
    async with serving(refused) as client:
        with pytest.raises(BadAnswerError, match=r"503 Service Unavailable.*not ready"):
            await client.ask(REQUEST)


async def test_an_answer_without_an_end_is_an_error_after_a_while_or_when_the_server_hangs_up() -> None:
    async with serving(STREAM[:-7], pause=1) as client:
        with pytest.raises(BadAnswerError, match=r"no complete answer after 0\.2 s"):
            await client.ask(REQUEST, seconds=0.2)
    async with serving(STREAM[:-7]) as client:
        with pytest.raises(BadAnswerError, match="hung up"):
            await client.ask(REQUEST)


def test_a_stream_without_its_last_event_is_an_error() -> None:
    with pytest.raises(BadAnswerError, match="no end"):
        StreamedAnswer(0.0, body=bytearray(event("ab"))).text()


async def test_no_more_requests_run_at_once_than_asked_for() -> None:
    async with serving(*[STREAM] * 6) as client:
        answers = await client.ask_all([REQUEST] * 6, concurrency=2)
    others = [sum(a is not b and a.asked <= b.asked < a.ended for a in answers) for b in answers]
    assert (len(answers), max(others)) == (6, 1)


def test_cpu_time_is_the_process_own() -> None:
    before, spent = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() < spent + 0.1:
        pass
    assert 0.05 <= cpu_seconds(os.getpid()) - before <= 0.5


# -- the report


def measured(*strategies: tuple[str, Sequence[float], Sequence[float], float]) -> Rounds:
    """Of each its name, TTFTs, throughputs and microseconds of CPU a token."""
    rounds = Rounds()
    for strategy, ttfts, throughputs, cpu in strategies:
        roles = ("agg",) if strategy == "agg" else ("prefill", "decode")
        others = {"itl": 0.2, "ttft_together": 30.0, "chunks": 0.1}
        cpus = {f"{role} worker CPU per token": cpu for role in roles}
        for ttft, throughput in zip(ttfts, throughputs, strict=True):
            rounds.note(strategy, {"ttft": ttft, "throughput": throughput, **others, **cpus})
    return rounds


def test_targets_are_of_neighbours_in_time() -> None:
    outcomes = measured(
        ("agg", [1, 1, 1], [9, 9, 9], 10.0),
        ("prefill_first", [3, 30, 4], [80, 8, 70], 31.0),
        ("decode_first", [2.5, 29, 4], [90, 10, 110], 40.0),
        ("router", [2.5, 29.5, 2], [100, 10, 100], 40.0),
    )
    with_target = {
        f.figure: (round(f.value, 6), f.target, f.ok) for f in figures_of([section_of(outcomes)]) if f.target
    }
    assert with_target == {
        "prefill_first prefill worker CPU per token": (31.0, "<= 30", False),
        "prefill_first TTFT - router": (0.5, "<= 1", True),
        "prefill_first tok/s / router": (0.8, ">= 0.9", False),
        "decode_first TTFT - router": (0.0, "<= 1", True),
        "decode_first tok/s / router": (1.0, ">= 0.9", True),
    }


def test_traces_are_judged_by_neighbours_in_time_that_are_not_traced() -> None:
    outcomes = measured(
        ("decode_first, none traced", [1, 1, 1], [100, 10, 100], 40.0),
        ("decode_first, 1% traced", [1, 1, 1], [97, 9.9, 99], 42.0),
        ("decode_first, every traced", [1, 1, 1], [90, 9, 90], 44.0),
    )
    for subject, beside in zip(outcomes.subjects, (3.0, 3.03, 3.3), strict=True):
        outcomes.values[subject]["workers' CPU by the frontend's"] = [beside] * 3
    figures = {f.figure: f for f in figures_of([section_of(outcomes)])}
    one_percent = figures["decode_first, 1% traced: tok/s / none"]
    assert (round(one_percent.value, 6), one_percent.target, one_percent.ok) == (0.99, ">= 0.98", True)
    assert figures["decode_first, every traced: tok/s / none"].value == pytest.approx(0.9)
    assert figures["decode_first, 1% traced: decode worker CPU per token / none"].value == pytest.approx(1.05)
    by_the_frontends = figures["decode_first, 1% traced: workers' CPU by the frontend's / none"]
    assert by_the_frontends.value == pytest.approx(1.01)


def test_workers_whose_cpu_time_is_below_the_clocks_tick_are_compared() -> None:
    outcomes = measured(
        ("decode_first, none traced", [1, 1], [100, 100], 0.0),
        ("decode_first, every traced", [1, 1], [90, 90], 0.0),
        (BASELINE, [1, 1], [90, 90], 0.0),
    )
    none = cpu_quantities({"prefill": 0.0, "decode": 0.0}, 0.0, 100)
    for subject in outcomes.subjects:
        outcomes.values[subject] |= {quantity: [value] * 2 for quantity, value in none.items()}
    figures = {f.figure: f.value for f in figures_of([section_of(outcomes)])}
    assert figures["decode_first, every traced: decode worker CPU per token / none"] == 1.0
    assert figures["decode_first, every traced decode worker CPU per token"] == pytest.approx(100.0)


def test_without_what_dynamos_worker_imports_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    # The meta path as Python documents it: a module of None cannot be found.
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"--upstream: dynamo.trtllm needs blake3; pip install"):
        overhead.main(["--quick", "--upstream"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rounds", "0"], "--rounds: '0' is not allowed; expected a number from 1 to 10000"),
        (["--concurrency", "4097"], "--concurrency: '4097' is not allowed; expected a number from 1 to 4096"),
        (["--step-ms", "-1"], "--step-ms: '-1' is not allowed"),
    ],
)
def test_wrong_number_is_refused_by_its_flag(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        overhead.main(flags)


def test_a_quick_run_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = measured(("prefill_first", [3], [80], 31.0), ("router", [2.5], [80], 1.0))
    print_report(wide_console(), [section_of(outcomes, TOO_SHORT)])
    out = capsys.readouterr().out
    assert out.endswith("No target is judged: the run is too short.\n")
    assert not {"met", "missed"} & set(out.split())


# -- the real thing


def test_real_deployments_give_the_same_answers_and_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Dynamo's own worker beside ours."""
    strategies = ["--strategy", "prefill_first", "router"]
    assert overhead.main(["--quick", "--json", "--upstream", *strategies]) == 0
    figures = {entry["figure"]: entry for entry in json.loads(capsys.readouterr().out)}
    for name in ("prefill_first", "router"):
        assert figures[f"{name} ttft"]["value"] > 0
        assert figures[f"{name} throughput"]["value"] > 0
        assert 0 < figures[f"{name} chunks"]["value"] <= 1.5
    assert figures["dynamo.trtllm router chunks"]["value"] == pytest.approx(1.0)
    for name in ("prefill_first tok/s / router", "prefill_first: tok/s / dynamo.trtllm router"):
        assert figures[name]["value"] > 0
    assert figures["prefill_first: workers' CPU per token / dynamo.trtllm router"]["value"] > 0
    assert {entry["target"] for entry in figures.values()} == {None}


# -- an interrupt


class InterruptedInTheThirdRound:
    """Measures nothing; Ctrl-C comes in the third round."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._times_measured = -1  # the first time warms it up

    async def measure(self, load: Load) -> tuple[str, dict[str, float]]:
        self._times_measured += 1
        if self._times_measured == 3 and self.name == "router":
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        quantities = dict.fromkeys(("ttft", "itl", "throughput", "ttft_together", "chunks"), 1.0)
        return "text", quantities | cpu_quantities({"agg": self._times_measured}, 1.0, 1)


def test_an_interrupted_benchmark_prints_the_complete_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def started(name: str, config: object) -> AsyncIterator[InterruptedInTheThirdRound]:
        yield InterruptedInTheThirdRound(name)

    monkeypatch.setattr(overhead, "started", started)
    with pytest.raises(KeyboardInterrupt):
        overhead.main(["--strategy", "agg", "router", "--json"])
    figures = {each["figure"]: each["value"] for each in json.loads(capsys.readouterr().out)}
    assert figures["agg agg worker CPU per token"] == figures["router agg worker CPU per token"] == 1.5e6
