"""The flags of a report, and what a terminal shows of it. A run calls `tell` when it ends; --report calls it alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from trtllm_disagg.bench.report import wide_console
from trtllm_disagg.bench.strategies.records import RunDirectory
from trtllm_disagg.bench.strategies.slo import DEFAULT_SLO, Slo
from trtllm_disagg.errors import ConfigError


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="measure nothing: the report of this run directory"
    )
    parser.add_argument(
        "--slo",
        type=_slo,
        default=DEFAULT_SLO,
        metavar="NAME=MS,...",
        help="an answer is in time with: ttft, tpot, latency (default: ttft=500,tpot=30)",
    )
    parser.add_argument(
        "--advise", action="store_true", help="only say what to run and what changes it; draw nothing"
    )


def tell(run: RunDirectory, slo: Slo, *, is_only_advice: bool) -> None:
    """Raises ConfigError for a directory without a run, or where matplotlib or Jinja is needed and absent."""
    from trtllm_disagg.bench.strategies.report import report_of, write_report

    report = report_of(run, slo) if is_only_advice else write_report(run, slo)
    console = wide_console()
    console.print(report.advice(), markup=False)
    if not is_only_advice:
        console.print(f"\n{run.path / 'report.html'}", markup=False, soft_wrap=True)


def _slo(text: str) -> Slo:
    try:
        return Slo.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
