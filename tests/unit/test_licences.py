"""Every dependency that runs is on the page of licences, with its version and what it says of itself."""

from __future__ import annotations

import re
from importlib import metadata

from tools.licences import PAGE, page, pins


def test_the_page_has_every_pin_with_a_licence() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )[2:]
    assert [(name, version) for name, version, _ in rows] == pins(), "python -m tools.licences writes it"
    assert len(rows) > 50
    assert not [name for name, _, licence in rows if not licence.strip()]


def test_licences_page_is_up_to_date() -> None:
    """But for packages in another version here (the extra `bench` brings some), perhaps with another licence."""
    others = {name for name, version in pins() if metadata.version(name) != version}

    def rows(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.partition(" | ")[0][2:] not in others]

    assert rows(PAGE.read_text(encoding="utf-8")) == rows(page()), "python -m tools.licences writes it"
