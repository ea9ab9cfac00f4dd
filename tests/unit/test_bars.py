"""Pictures of measured numbers are those of their data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bars import pictures


@pytest.mark.parametrize("path", pictures(), ids=lambda path: path.name)
def test_a_picture_is_that_of_its_data(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == pictures()[path], "python -m tools.bars draws it"
