"""`trtllm-disagg plan`: which layout of modelled GPUs suits a model, traffic and limits, simulated in seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.errors import ConfigError
from trtllm_disagg.processes.exits import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from trtllm_disagg.cli import Parser
    from trtllm_disagg.tools.plan.chart import Chart
    from trtllm_disagg.tools.plan.comparison import LayoutComparison


def add_arguments(parser: Parser) -> None:
    add_layout_arguments(parser)
    parser.replaced = {"--by-limits": "give other limits by --slo"}
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="also a picture: what is answered in time, by rate"
    )


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` simulates and `bench strategies` measures: a model, its traffic and limits, and engines."""
    add, configs = parser.add_argument, Path("engine_configs/modelled")
    text = "directory with a tokenizer and a config.json"
    add("--model", type=Path, required=True, metavar="DIR", help=text)
    add("--slo", metavar="LIMITS", help="milliseconds that an answer may take (default: ttft=500,tpot=30)")
    add("--workers", metavar="N,...", help="workers of a layout, all roles together (default: 2,4)")
    text = (
        "chat, rag, reasoning, agentic, prefixes, bursts, trace, or tokens in:out, as 4096:256 (default: all)"
    )
    add("--workloads", metavar="NAME,...", help=text)
    add("--trace", type=Path, metavar="FILE", help="the workload trace: lines of a Mooncake trace")
    text = "requests a second (default: around the rate up to which the best layout keeps the limits)"
    add("--rates", metavar="R,...", help=text)
    text = "agg.yaml, prefill.yaml and decode.yaml, of as many GPUs each (default: %(default)s)"
    add("--engine-configs", type=Path, default=configs, metavar="DIR", help=text)
    text = 'over the YAML files of all roles, as \'{"modelled": {"system": "h200_sxm"}}\''
    add("--override-engine-args", default="", metavar="JSON", help=text)


def run(args: argparse.Namespace) -> ExitCode:
    # Imported here: `--help` needs no tables.
    import msgspec

    from trtllm_disagg.console import Console
    from trtllm_disagg.processes.steadily import without_silence
    from trtllm_disagg.tools.plan.chart import picture
    from trtllm_disagg.tools.plan.comparison import compare_layouts
    from trtllm_disagg.tools.plan.layouts import DEFAULT_WORKERS, layouts_of, worker_counts
    from trtllm_disagg.tools.plan.modelled_gpus import Engines
    from trtllm_disagg.tools.plan.slo import slo_of
    from trtllm_disagg.tools.plan.workloads import chosen_workloads, rates_of

    counts, slo = worker_counts(args.workers or DEFAULT_WORKERS), slo_of(args.slo)
    files = args.engine_configs, layouts_of(max(counts))
    engines = Engines.read("modelled", args.model, *files, args.override_engine_args)
    workloads = list(chosen_workloads(args.workloads, args.trace, engines.longest).values())
    rates = rates_of(args.rates) if args.rates else ()
    with without_silence(lambda text: print(text, file=sys.stderr, flush=True), "simulating"):
        compared = compare_layouts(engines, counts, workloads, slo, rates)
    if args.plot:
        try:
            args.plot.write_text(picture([_chart(each) for each in compared]), encoding="utf-8")
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise ConfigError.bad_value("--plot", str(args.plot), allowed) from None
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(compared)).decode())
        return ExitCode.DONE
    console = Console(paper=110)
    for each in compared:
        alone = f"a lone request has {each.ttft_alone:.3g} / {each.tpot_alone:.3g}"
        console.paragraph(
            f"{each.subject}\nTTFT / TPOT in ms, medians; {alone}; * = the limits are not kept\n"
        )
        console.print(_at_rates(each))
        console.print()
    for each in compared:
        console.paragraph(each.sentence())
    return ExitCode.DONE


def _at_rates(compared: LayoutComparison) -> Table:
    from rich.table import Table

    table = Table("requests/s", box=None, pad_edge=False)
    for each in next(iter(compared.layouts.values())).at:
        table.add_column(f"{each.rate:.3g}", justify="right")
    for header in ("up to", "tok/s/GPU"):
        table.add_column(header, justify="right")
    for name, result in compared.layouts.items():
        times = [f"{each.times}{' ' if each.keeps_limits else '*'}" for each in result.at]
        most = (f"{result.rate:.3g}", f"{result.tokens_s_gpu:.0f}") if result.rate else ("none", "")
        table.add_row(name, *times, *most)
    return table


def _chart(compared: LayoutComparison) -> Chart:
    from trtllm_disagg.tools.plan.chart import Chart

    points = {
        name: [(each.rate, each.rate * each.in_time) for each in result.at]
        for name, result in compared.layouts.items()
    }
    most = max(rate for each in points.values() for rate, _ in each)
    title = "requests/s answered within the limits"
    return Chart(compared.subject, "requests/s offered", title, points, ("all", [(0, 0), (most, most)]))
