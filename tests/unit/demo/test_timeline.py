"""The demo's picture is drawn from the workers' journals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from trtllm_disagg.demo.chat import Answer, WrappedText
from trtllm_disagg.demo.timeline import read_timeline, render
from trtllm_disagg.handlers.trace import PREFIX

ANSWER = Answer(text="hello", sent=100.0, first_text=100.02, done=100.10)


def journal(
    path: Path, part: str, *, start: float, chunks: tuple[float, ...], end: float, tokens: int, **more: object
) -> None:
    entry = {
        "request": "r",
        "part": part,
        "prompt_tokens": 7,
        "tokens": tokens,
        "finish_reason": "length",
        "start": start,
        "first_chunk": chunks[0],
        "second_chunk": chunks[1] if len(chunks) > 1 else None,
        "end": end,
    } | more
    path.write_text(
        f"noise: request r: nothing of ours\n12:00:00 INFO x.journal: {PREFIX}{json.dumps(entry)}\n"
    )


def test_prefill_first_is_told_from_both_journals(tmp_path: Path) -> None:
    prefill, decode = tmp_path / "p.log", tmp_path / "d.log"
    journal(prefill, "prefill/prefill_first", start=100.001, chunks=(100.015, 100.035), end=100.1, tokens=5)
    journal(
        decode,
        "decode/prefill_first",
        start=100.016,
        chunks=(100.034,),
        end=100.099,
        tokens=4,
        disagg={"strategy": "x", "kv_transfer_ms": 1.234, "kv_transfer_bytes": 81920},
    )

    picture = render(read_timeline({"prefill-0": prefill, "decode-0": decode}, ANSWER), 200)

    rows = picture.splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["client", "prefill-0", "decode-0"]
    assert "prefilled 7 tokens, gave token 1, passed on 4 of decode's" in rows[1]
    assert "decoded 4" in rows[2]
    assert "first token at the client after 20.0 ms" in picture
    assert "handoff (KV moved to decode, and the second token computed there): 20.0 ms" in picture
    assert rows[-1].strip() == "80 KiB of KV were on their way for 1.2 ms"


@pytest.mark.parametrize("columns", [80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    log = tmp_path / "p.log"
    journal(log, "prefill/prefill_first", start=100.0, chunks=(112.3, 113.4), end=199.9, tokens=60)
    answer = Answer(text="hello", sent=100.0, first_text=112.4, done=200.0)

    rows = render(read_timeline({"prefill-0": log}, answer), columns).splitlines()

    assert max(map(len, rows)) <= columns
    assert any("prefilled 7 tokens, gave token 1, passed on 59 of decode's" in row for row in rows)


def test_text_in_pieces_breaks_between_words() -> None:
    stream = io.StringIO()
    text = WrappedText(stream, 20, "   ")
    for piece in ("About a li", "st: Built", "-in mutable", " sequence", ".\n\nIf", " no argu", "ment"):
        text.write(piece)
    text.end()
    lines = ["About a list:", "Built-in mutable", "sequence.", "", "If no argument"]
    assert stream.getvalue() == "".join(f"   {line}\n" for line in lines)


def test_requests_before_this_one_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    journal(log, "prefill/decode_first", start=99.0, chunks=(99.1,), end=99.2, tokens=1)

    assert read_timeline({"prefill-0": log}, ANSWER).entries == {}
