"""Every test here begins without instances of the scripted LLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trtllm_disagg.engines.recording.llm import LLM


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    LLM.forget_instances()
    yield
    LLM.forget_instances()
