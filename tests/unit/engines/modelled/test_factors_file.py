"""Step times that are made longer or shorter while the engine runs, by a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.modelled_cores import ModelledTestCore, prompt_of
from trtllm_disagg.engines.modelled.factors import Factors
from trtllm_disagg.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Factors().write(tmp_path / "factors.json")
    return tmp_path / "factors.json"


def first_token(core: ModelledTestCore, salt: int) -> float:
    return core.seconds_of(prompt_of(64, salt), 1)[0]


def test_factors_change_with_the_file_once_the_engine_has_rested(file: Path) -> None:
    core = ModelledTestCore(modelled={"factors_file": str(file)})
    before = first_token(core, 0)
    Factors(prefill=3.0).write(file)
    assert first_token(core, 1) == pytest.approx(3 * before)


def test_requests_that_run_keep_the_factors_that_they_began_with(file: Path) -> None:
    core = ModelledTestCore(modelled={"factors_file": str(file)})
    request = core.add(prompt_of(64), 8)
    core.step()
    core.step()
    steady = core.clock.now()
    core.step()
    one_token = core.clock.now() - steady
    Factors(decode=5.0).write(file)
    steady = core.clock.now()
    core.step()
    assert core.clock.now() - steady == pytest.approx(one_token, rel=0.01)
    core.run(request)


def test_a_file_that_became_bad_changes_nothing(file: Path) -> None:
    core = ModelledTestCore(modelled={"factors_file": str(file)})
    before = first_token(core, 0)
    file.write_text("{")
    assert first_token(core, 1) == pytest.approx(before)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"prefill_factor": 1}', '{"prefill_factor": 0, "decode_factor": 1}']
)
def test_factors_file_without_valid_factors_is_refused_at_the_start(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"modelled\.factors_file"):
        ModelledTestCore(modelled={"factors_file": str(file)})
