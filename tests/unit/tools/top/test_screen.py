"""The live screen in a terminal of 80 columns, and the frame that `--once` prints."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, RichLog, Static

from trtllm_disagg import cli
from trtllm_disagg.console import Console
from trtllm_disagg.exit_codes import ExitCode
from trtllm_disagg.tools.top import frame
from trtllm_disagg.tools.top.history import History, events_between
from trtllm_disagg.tools.top.screen import Top
from trtllm_disagg.tools.top.snapshot import SILENT, FrontendLoad, Histogram, Process, Snapshot, WorkerLoad

SIZE = (80, 24)


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


class Looks:
    """Each of them once; the last one again and again."""

    def __init__(self, *looks: Snapshot) -> None:
        self._looks = list(looks)
        self.count = 0

    async def look(self) -> Snapshot:
        self.count += 1
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


async def look(app: Top, pilot: Pilot[None]) -> None:
    app.action_look()
    await app.workers.wait_for_complete()
    await pilot.pause()


def rows(app: Top) -> list[list[str]]:
    table: DataTable[Any] = app.query_one("#processes", DataTable)
    return [[str(cell) for cell in table.get_row_at(place)] for place in range(table.row_count)]


def events(app: Top) -> str:
    return " ".join(line.text.strip() for line in app.query_one("#events", RichLog).lines)


async def test_the_screen_fits_80_columns_and_shows_workers_rates_and_events() -> None:
    app = Top(Looks(FIRST, SECOND), 3600)
    async with app.run_test(size=SIZE) as pilot:
        await app.workers.wait_for_complete()
        await look(app, pilot)
        assert rows(app)[1][:3] == ["prefill-0", "no answer", "-"]
        assert rows(app)[2][:9] == ["decode-0", "ready", "9", "0", "25%", "0", "-", "50", "1"]
        table: DataTable[Any] = app.query_one("#processes", DataTable)
        assert table.virtual_size.width <= SIZE[0]
        told = events(app)
        assert "the order is prefill_first now (it was decode_first)" in told
        assert "prefill-0 is no answer" not in told
        assert "prefill-0 does not answer any more" in told
        assert "decode-0: circuit breaker open for 1 worker" in told
        assert "decode-0: instance 1aa failed 3 times in a row" in told
        picture = app.export_screenshot()
        for shown in ("prefill_first", "decode-0", "Quit"):
            assert shown in picture


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
    ("width", "last"), [(40, "0"), (80, "loading w…"), (132, "loading weights: 12 of 163 files, xxxx")]
)
async def test_top_screen_of_any_width_has_only_complete_columns(width: int, last: str) -> None:
    app = Top(Looks(LARGE), 3600)
    async with app.run_test(size=(width, 24)):
        await app.workers.wait_for_complete()
        table: DataTable[Any] = app.query_one("#processes", DataTable)
        assert table.virtual_size.width <= width
        shown = rows(app)
        assert shown[1][:4] == ["prefill-10", "ready", "128", "1234"]
        assert shown[2][-1].startswith(last)


@pytest.mark.parametrize("width", [40, 80, 132])
def test_top_frame_of_any_width_has_only_complete_columns(width: int) -> None:
    out = io.StringIO()
    frame.print_frame(LARGE, Console(out, paper=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    (full,) = (line.split() for line in lines if line.startswith("prefill-10"))
    assert full == ["prefill-10", "ready", "128", "1234", "100%", "321", "-"][: len(full)]
    assert len(full) >= 4


def test_a_worker_that_does_not_answer_has_no_rate() -> None:
    history = History()
    for at, seen in enumerate((FIRST, FIRST, SECOND)):
        history.add(replace(seen, at=float(at)))
    assert history.rate(FIRST.processes[1], "prefill_tokens") == 0
    assert history.rate(SECOND.processes[1], "prefill_tokens") is None


async def test_keys_sort_pause_explain_and_quit() -> None:
    looks = Looks(FIRST)
    app = Top(looks, 3600)
    async with app.run_test(size=SIZE) as pilot:
        await app.workers.wait_for_complete()
        await pilot.press("s", "s", "s")
        assert [row[0] for row in rows(app)] == ["decode-0", "prefill-0", "frontend"]
        await pilot.press("r")
        assert [row[0] for row in rows(app)] == ["frontend", "prefill-0", "decode-0"]
        await pilot.press("p")
        before = looks.count
        await look(app, pilot)
        assert looks.count == before
        assert "paused" in str(app.query_one("#headline", Static).render())
        await pilot.press("question_mark")
        assert "handoffs that wait for decode" in events(app)
        await pilot.press("q")
    assert app.return_code == 0


async def test_ctrl_c_ends_the_screen_with_the_code_for_it() -> None:
    app = Top(Looks(FIRST), 3600)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+c")
    assert app.return_code == ExitCode.INTERRUPTED


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
        (replace(FIRST, processes=(*FIRST.processes, worker("decode-1"))), "decode-1 is new, ready"),
        (
            replace(FIRST, processes=(*FIRST.processes[:2], replace(FIRST.processes[2], pid=8))),
            "decode-0 was started again: pid 8",
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


def test_a_frame_as_json_has_its_numbers() -> None:
    said = json.loads(frame.to_json(FIRST))
    assert said["strategy"] == "decode_first"
    assert said["frontend"]["ttft_seconds"]["count"] == 2
    assert said["frontend"]["itl_seconds"] is None
    assert [process["load"]["kv_blocks"] for process in said["processes"]] == [None, 0, 250]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of --run-dir DIR and --url URL"),
        (["--run-dir", "a", "--url", "http://b"], "one of --run-dir DIR and --url URL"),
        (["--run-dir", "a", "--json"], "add --once"),
        (["--run-dir", "a", "--once", "--interval", "0"], "--interval: 0.0 is not allowed"),
        (["--run-dir", "a"], "the live screen needs a terminal; --once prints one frame"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["top", *argv])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
