"""The pages that are made from the code say what the code says."""

from __future__ import annotations

import pytest

from tools.reference import FOLDER, PAGES
from trtllm_disagg.config.worker_config import FLAGS
from trtllm_disagg.engines.embedded.params.llm_args import LlmArgs
from trtllm_disagg.errors import DisaggError


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


def test_every_flag_error_and_argument_is_on_its_page() -> None:
    assert all(f"| `{flag.names[0]}`" in PAGES["flags.md"]() for flag in FLAGS.values())
    kinds = [DisaggError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert all(
        f"| `{kind.__name__}` |" in PAGES["errors.md"]() for kind in kinds if "errors" in kind.__module__
    )
    assert all(f"| `{name}` |" in PAGES["engine-arguments.md"]() for name in LlmArgs.model_fields)
