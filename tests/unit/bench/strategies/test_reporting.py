"""--advise and --slo at a terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.unit.bench.strategies.synthetic import Behaviour, saved
from trtllm_disagg.bench.strategies.reporting import add_report_arguments, tell


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_report_arguments(parser)
    return parser.parse_args(arguments)


def test_advice_alone_is_printed_and_nothing_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path, {"2 agg": Behaviour(6), "1P1D router": Behaviour(12, strategy="router")})
    args = parsed("--advise", "--slo", "ttft=400")
    tell(run, args.slo, is_only_advice=args.advise)
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(
        "chat on 2 GPUs: run router with 1 prefill worker and 1 decode worker (1P1D router)."
    )
    assert "within TTFT 400 ms" in told
    assert not (tmp_path / "report.html").exists()


def test_an_slo_that_is_none_is_refused_as_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--slo", "itl=30")
    assert "ttft, tpot, latency" in capsys.readouterr().err
