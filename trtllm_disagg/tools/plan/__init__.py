"""`trtllm-disagg plan`: simulates layouts of modelled GPUs, and picks the best for a model, traffic and limits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from trtllm_disagg.common.cli import Parser
    from trtllm_disagg.tools.plan.chart import Chart
    from trtllm_disagg.tools.plan.comparison import LayoutComparison


def add_arguments(parser: Parser) -> None:
    add_layout_arguments(parser, "model name, such as llama-3.1-70b-fp8, or a directory with a config.json")
    add = parser.add_argument
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--gpus", metavar="N,...", help="GPUs in total (default: 8)")
    text = "instead of --gpus: number of workers; the engine files set their GPUs"
    sizes.add_argument("--workers", metavar="N,...", help=text)
    add("--tp", metavar="N,...", help="with --gpus: GPUs per worker (default: 1, 2, 4, 8, ...)")
    add("--gpu", metavar="NAME", help="h100_sxm, h200_sxm, b200_sxm, ... (default: the engine files')")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the share of answers in time, by rate")


def add_layout_arguments(parser: argparse.ArgumentParser, model: str) -> None:
    """The flags that `plan` and benchmarks/orders.py share: model, traffic, limits and engines."""
    from trtllm_disagg.tools.plan.workloads import add_arguments as add_traffic

    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="MODEL", help=model)
    add("--slo", metavar="LIMITS", help="latency limits in ms (default: ttft=500,tpot=30)")
    text = "chat, rag, reasoning, agentic, prefixes, bursts, trace, or tokens in:out, such as 4096:256 (default: all)"
    add("--workloads", metavar="NAME,...", help=text)
    add_traffic(parser)
    add("--trace", type=Path, metavar="FILE", help="file of the workload trace, in Mooncake's format")
    text = "requests per second (default: around the best layout's highest rate within the limits)"
    add("--rates", metavar="R,...", help=text)
    text = "directory with agg.yaml, prefill.yaml, decode.yaml (default: engine_configs/modelled)"
    add("--engine-configs", type=Path, metavar="DIR", help=text)
    text = 'overrides the YAML files of all roles, such as \'{"modelled": {"system": "h200_sxm"}}\''
    add("--override-engine-args", default="", metavar="JSON", help=text)


def run(args: argparse.Namespace) -> ExitCode:
    import msgspec

    from trtllm_disagg.common.console import Console
    from trtllm_disagg.common.steadily import without_silence
    from trtllm_disagg.tools.plan.chart import picture
    from trtllm_disagg.tools.plan.comparison import compare_layouts
    from trtllm_disagg.tools.plan.modelled_gpus import Engines, divisions
    from trtllm_disagg.tools.plan.slo import slo_of
    from trtllm_disagg.tools.plan.workloads import chosen_workloads, rates_of

    slo, engines = slo_of(args.slo), Engines.planned(args)
    workloads = list(chosen_workloads(args, engines.longest).values())
    rates, share = rates_of(args.rates) if args.rates else (), 0.0

    def report(done: float) -> None:
        nonlocal share
        share = done

    def show(text: str) -> None:
        print(f"{text}, {share:.0%} done", file=sys.stderr, flush=True)

    with without_silence(show, "simulating"):
        sizes, refused = divisions(args, engines)
        compared = compare_layouts(sizes, workloads, slo, rates, report)
    if args.plot:
        try:
            args.plot.write_text(picture([_chart(each) for each in compared]), encoding="utf-8")
        except OSError as error:
            allowed = f"a writable file ({error.strerror})"
            raise ConfigError.bad_value("--plot", str(args.plot), allowed) from None
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(compared)).decode())
        return ExitCode.DONE
    console = Console(paper=120)
    for each in compared:
        alone = f"a lone request has {each.ttft_alone:.3g} / {each.tpot_alone:.3g}"
        console.paragraph(
            f"{each.subject}\nTTFT / TPOT in ms, medians; {alone}; * = misses the limits; TP2 = 2 GPUs a worker\n"
        )
        console.print(_at_rates(each))
        console.print()
    for size, why in refused.items():
        console.paragraph(f"without workers of {size} GPU{'s' * (size > 1)}: {why}")
    for each in compared:
        console.paragraph(each.sentence())
    return ExitCode.DONE


def _at_rates(compared: LayoutComparison) -> Table:
    from rich.table import Column, Table

    table = Table(Column("requests/s", no_wrap=True), box=None, pad_edge=False)
    rates = [f"{each.rate:.3g}" for each in compared.layouts[compared.best].at]
    for header in (*rates, "up to", "tok/s/GPU"):
        table.add_column(header, justify="right")
    for name, result in compared.layouts.items():
        shown = [f"{each.times}{' ' if each.keeps_limits else '*'}" for each in result.at]
        times = shown or [""] * len(rates)
        peak = (f"{result.rate:.3g}", f"{result.tokens_s_gpu:.0f}") if result.rate else ("none", "")
        table.add_row(name, *times, *peak)
    return table


def _chart(compared: LayoutComparison) -> Chart:
    from trtllm_disagg.tools.plan.chart import Chart

    points = {
        name: [(each.rate, each.rate * each.in_time) for each in result.at]
        for name, result in compared.layouts.items()
        if result.at
    }
    peak = max(rate for each in points.values() for rate, _ in each)
    title = "requests/s answered within the limits"
    return Chart(compared.subject, "requests/s offered", title, points, ("all", [(0, 0), (peak, peak)]))
