"""Each order on the recording engine: all of a deployment but the engine, in an environment that may have no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deployments import WORKER_SIDE, demo_config, served


@pytest.mark.parametrize("order", WORKER_SIDE)
def test_a_deployment_on_the_recording_engine_answers_in_its_order(order: str, tmp_path: Path) -> None:
    config = demo_config(order, tmp_path / "run", engine="recording", engine_configs={})
    asked = {"ignore_eos": True, "nvext": {"extra_fields": ["engine_data"]}}
    with served(config) as deployed:
        answer = deployed.openai.completions.create(
            model=config.served_model_name, prompt=[5, 6, 7, 8], max_tokens=9, extra_body=asked
        ).to_dict()
    assert answer["usage"]["completion_tokens"] == 9  # type: ignore[index]
    trace = answer["nvext"]["engine_data"]["disagg"]  # type: ignore[index]
    assert (trace["strategy"], trace.get("fallbacks")) == (order, None)
