"""The pages that are made from the code say what the code says."""

from __future__ import annotations

import pytest

from tools.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_generated_reference_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "python -m tools.reference writes it"


def test_the_page_of_errors_has_the_exception_and_status_that_leave_a_worker() -> None:
    rows = [line for line in PAGES["errors.md"]().splitlines() if line.startswith("| `")]
    cells = {
        row[0]: row[2:5] for row in ([cell.strip(" `") for cell in line.split("|")[1:]] for line in rows)
    }
    assert cells["RequestCancelledError"] == ["Cancelled", "CannotConnect", "503"]
    assert cells["WorkerLeavingError"] == ["Leaving", "EngineShutdown", "503"]
    assert cells["StageTimeoutError"] == ["DeadlineExceeded", "ConnectionTimeout", "504"]
