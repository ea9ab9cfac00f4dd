"""One word for one idea: names and phrases that were given up are in no code and on no page."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("trtllm_disagg", "handlers", "launch", "scripts", "benchmarks", "examples")
#: Parts of Python names -> the word to use.
GIVEN_UP = {
    "errand": "phase_request",
    "most": "max",
    "told": "description, or what is said",
    "tell": "report, send",
    "tells": "reports",
    "taken": "fetched, used",
    "rest": "remaining, idle",
    "arm": "start",
    "way": "strategy, attempt",
    "ways": "strategies, attempts",
}
#: Text -> the word to use. A quoted name of the wire may be that of 0.2.
OLD_TEXTS = {
    r"\berrands?\b(?!\")": "phase request",
    r"\b_?most_[a-z]\w+|\b_?MOST_[A-Z]\w+": "max_...",
    r"\bis_\.": "description",
    r"FewTurnsLater": "FewTicksLater",
    r"\bwhole_requests\b(?!\")": "client_requests",
    r"\bis_worker_side\b(?!\")|\bWorkerSidePlan\b": "is_run_by_workers, ChainingPlan",
    r"handlers[./]select\b": "handlers/selection.py",
    r"\bengine[./]engines\b": "engine/table.py",
    r"(?i)\bnobody\b|\bsomebody\b|\bwhoever\b|\bwho(se|m)\b|(?-i:\bwho\b)": "a subject that exists",
    r"(?i)\b(so|how) many\b|\bsome \d": "number of, about",
    r"\bway of (its|the) KV\b|\btried there\b": "attempt",
    r"\brole'?s? turns?\b|\bRoleTurn": "role term",
    r"(?i)\bpartners?\b": "peer",
    r"\b(is_|be )quiet\b|\btold (it )?to (stop|end|leave)\b": "drain",
    r"\bis_hidden\b|\.hide\(": "unlisted",
}


def code() -> Iterator[Path]:
    for folder in CODE:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml"))


def pages() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))
    yield from (ROOT / "docs").rglob("*.md")


def test_no_name_has_a_part_that_was_given_up() -> None:
    found = []
    for path in code():
        if path.suffix != ".py":
            continue
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME:
                for part in GIVEN_UP.keys() & token.string.lower().split("_"):
                    found.append(f"{path}:{token.start[0]}: {token.string}: say {GIVEN_UP[part]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("pattern", OLD_TEXTS)
def test_no_file_has_an_old_word(pattern: str) -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path in (*code(), *pages())
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"say {OLD_TEXTS[pattern]}:\n" + "\n".join(found)
