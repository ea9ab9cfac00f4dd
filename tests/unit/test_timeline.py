"""The demo's picture is drawn from the workers' journals."""

from __future__ import annotations

import json
from pathlib import Path

from trtllm_disagg.demo.chat import Answer
from trtllm_disagg.demo.timeline import read_timeline, render
from trtllm_disagg.handlers.journal import PREFIX

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

    picture = render(read_timeline({"prefill-0": prefill, "decode-0": decode}, ANSWER))

    rows = picture.splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["client", "prefill-0", "decode-0"]
    assert "prefilled 7 tokens, gave token 1, passed on 4 of decode's" in rows[1]
    assert "decoded 4" in rows[2]
    assert "first token at the client after 20.0 ms" in picture
    assert "handoff (KV moved to decode, and the second token computed there): 20.0 ms" in picture
    assert rows[-1].strip() == "80 KiB of KV were on their way for 1.2 ms"


def test_requests_before_this_one_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    journal(log, "prefill/decode_first", start=99.0, chunks=(99.1,), end=99.2, tokens=1)

    assert read_timeline({"prefill-0": log}, ANSWER).entries == {}
