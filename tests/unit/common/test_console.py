"""Colours: on a terminal, not in a pipe, and not where NO_COLOR is set. Every command prints through one class."""

from __future__ import annotations

import io
import re

import pytest

from trtllm_disagg.common.console import Console

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "has_colour"),
    [(Terminal, "", True), (Terminal, "1", False), (io.StringIO, "", False)],
)
def test_colours_are_for_terminals_that_want_them(
    stream: type[io.StringIO], no_color: str, has_colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    out = stream()
    Console(out).print("[red]error[/red] 7")
    assert "error" in out.getvalue()
    assert bool(COLOUR.search(out.getvalue())) is has_colour
    assert stream is Terminal or "\x1b" not in out.getvalue()


def test_a_paragraph_is_wrapped_between_words_on_a_terminal_and_one_line_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = "It answers up to 12.2 [12.2 to 12.2] requests/s :warning: here."
    shown, piped = Terminal(), io.StringIO()
    Console(shown).paragraph(text)
    Console(piped).paragraph(text)
    lines = shown.getvalue().splitlines()
    assert " ".join(line.rstrip() for line in lines) == text
    assert max(map(len, lines)) <= 20
    assert piped.getvalue() == f"{text}\n"
