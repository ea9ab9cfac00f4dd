"""The live frame in a terminal of 80 columns, and the frame that `--once` prints."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from trtllm_disagg.common import cli
from trtllm_disagg.common.console import Console
from trtllm_disagg.tools.top import frame
from trtllm_disagg.tools.top.snapshot import (
    SILENT,
    FrontendLoad,
    Histogram,
    History,
    Process,
    Snapshot,
    WorkerLoad,
    events_between,
)


def worker(name: str, **load: int) -> Process:
    sizes = {"batch": 0, "queued": 0, "kv_blocks": 0, "kv_blocks_total": 1000, "handoffs_held": 0}
    return Process(name, name.partition("-")[0], "ready", 7, "serving", WorkerLoad(**{**sizes, **load}))


BUCKETS = ((0.05, 1.0), (0.1, 2.0), (float("inf"), 2.0))
FIRST = Snapshot(
    100.0,
    "http://127.0.0.1:8000",
    "demo-model",
    "decode_first",
    "",
    (
        Process("frontend", "frontend", "ready", 6),
        worker("prefill-0", batch=2, decode_tokens=0, prefill_tokens=0),
        worker("decode-0", batch=9, kv_blocks=250, handoffs_held=3, breakers_open=0, decode_tokens=100),
    ),
    FrontendLoad(11, 0, 40, Histogram(BUCKETS, 0.15)),
)
SECOND = replace(
    FIRST,
    at=110.0,
    strategy="prefill_first",
    processes=(
        FIRST.processes[0],
        replace(FIRST.processes[1], state=SILENT, load=WorkerLoad()),
        worker("decode-0", batch=9, kv_blocks=250, breakers_open=1, decode_tokens=600, fallbacks=0),
    ),
    warnings=("decode-0: instance 1aa failed 3 times in a row: skipped for 10 s",),
)


def lines(history: History, width: int, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(out, paper=width).print(frame.live_frame(history, width, height))
    return out.getvalue().splitlines()


def test_live_frame_fits_80_columns_and_shows_workers_rates_and_events() -> None:
    history = History()
    for seen in (FIRST, SECOND):
        history.add(seen)
    shown = lines(history, 80)
    assert max(map(len, shown)) <= 80
    assert len(shown) <= 24
    rows = {line.split()[0]: line.split() for line in shown if line.strip()}
    assert rows["prefill-0"][1:4] == ["no", "answer", "-"]
    assert rows["decode-0"] == ["decode-0", "ready", "9", "0", "25%", "0", "-", "50", "1", "-"]
    text = "\n".join(shown)
    for event in (
        "the order is now prefill_first (was decode_first)",
        "prefill-0 no longer answers",
        "decode-0: circuit breaker open for 1 worker",
        "decode-0: instance 1aa failed 3 times in a row",
    ):
        assert event in text
    assert len(lines(history, 80, height=10)) <= 10


#: One worker is full, one says much of its start, one does not answer.
LARGE = replace(
    FIRST,
    processes=(
        FIRST.processes[0],
        worker("prefill-10", batch=128, queued=1234, kv_blocks=1000, handoffs_held=321),
        replace(
            worker("prefill-11"), state="starting", doing="loading weights: 12 of 163 files, " + "x" * 40
        ),
        worker("decode-10", batch=64, kv_blocks=730, breakers_open=2),
        replace(worker("decode-11"), state=SILENT, load=WorkerLoad()),
    ),
)


@pytest.mark.parametrize(
    ("width", "last"), [(40, "0"), (80, "loading"), (132, "loading weights: 12 of 163 files, xxxx")]
)
def test_live_frame_of_any_width_has_only_complete_columns(width: int, last: str) -> None:
    history = History()
    history.add(LARGE)
    shown = lines(history, width)
    assert max(map(len, shown)) <= width
    (full,) = (line.split() for line in shown if line.startswith("prefill-10"))
    assert full[:4] == ["prefill-10", "ready", "128", "1234"]
    assert any(last in line for line in shown if line.startswith("prefill-11"))


def test_instance_ids_are_in_a_single_frame_and_where_a_live_one_has_room_for_all() -> None:
    history, some_id = History(), "b3d8f67b1b9e427a"
    history.add(replace(FIRST, processes=(replace(FIRST.processes[1], instance=some_id),)))
    assert any(some_id in line for line in lines(history, 100))
    narrow = lines(history, 80)
    assert not any(some_id in line for line in narrow)
    assert any("doing" in line for line in narrow)
    out = io.StringIO()
    frame.print_frame(history.last, Console(out, paper=100))
    assert some_id in out.getvalue()


def test_a_worker_that_does_not_answer_has_no_rate() -> None:
    history = History()
    for at, seen in enumerate((FIRST, FIRST, SECOND)):
        history.add(replace(seen, at=float(at)))
    assert history.rate(FIRST.processes[1], "prefill_tokens") == 0
    assert history.rate(SECOND.processes[1], "prefill_tokens") is None


def test_latencies_and_rates_are_of_the_window_and_a_frontend_that_began_anew_is_not_subtracted() -> None:
    history = History()
    history.add(FIRST)
    later = Histogram(((0.05, 1.0), (0.1, 3.0), (float("inf"), 3.0)), 0.15)
    more = replace(FIRST.frontend, requests=41, ttft=later)
    history.add(replace(FIRST, at=110.0, frontend=more))
    found = history.ttft()
    assert found is not None
    assert found.count == 1
    history.add(replace(FIRST, at=111.0, frontend=replace(FIRST.frontend, requests=1)))
    found = history.ttft()
    assert found is not None
    assert found.count == 2


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (replace(FIRST, doubt="`up` does not answer: gone"), "`up` does not answer: gone"),
        (replace(FIRST, processes=FIRST.processes[:2]), "decode-0 has left"),
        (replace(FIRST, processes=(*FIRST.processes, worker("decode-1"))), "decode-1 appeared, ready"),
        (
            replace(FIRST, processes=(*FIRST.processes[:2], replace(FIRST.processes[2], pid=8))),
            "decode-0 restarted: pid 8",
        ),
    ],
)
def test_a_change_is_an_event(after: Snapshot, told: str) -> None:
    assert [event.text for event in events_between(FIRST, after)] == [told]


# -- one frame


def printed(*, terminal: bool) -> str:
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    frame.print_frame(FIRST, Console(out, paper=80))
    return out.getvalue()


def test_a_frame_fits_80_columns_and_has_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = printed(terminal=False)
    assert max(map(len, plain.splitlines())) <= 80
    assert "\x1b" not in plain
    assert "TTFT 50 ms p99 99 ms" in plain
    assert "running 11, waiting 0, done 40" in plain.splitlines()
    assert "\x1b[32mready" in printed(terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in printed(terminal=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of --run-dir DIR and --url URL"),
        (["--run-dir", "a", "--url", "http://b"], "one of --run-dir DIR and --url URL"),
        (["--run-dir", "a", "--json"], "add --once"),
        (["--run-dir", "a", "--once", "--interval", "0"], "--interval: '0' is not allowed"),
        (["--run-dir", "a"], "the live screen needs a terminal; --once prints one frame"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["top", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
