"""Two engine files that make a pair, and doctor as it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.unit.tools.doctor.test_rules import DECODE, PREFILL
from trtllm_disagg.common.cli import main

Files = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    for variable in ("PREFILL_CUDA_VISIBLE_DEVICES", "DECODE_CUDA_VISIBLE_DEVICES", "NIXL_PLUGIN_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for name, content in (("prefill", PREFILL), ("decode", DECODE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "prefill.yaml", tmp_path / "decode.yaml"


def status_of(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


class Ended(NamedTuple):
    status: int
    out: str
    err: str


Doctor = Callable[..., Ended]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run(*argv: object) -> Ended:
        status = status_of(*argv)
        return Ended(status, *capsys.readouterr())

    return run
