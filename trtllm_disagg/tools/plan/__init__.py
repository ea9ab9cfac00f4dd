"""`trtllm-disagg plan`: which layout of modelled GPUs suits a model, traffic and limits, simulated in seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_disagg.processes.exits import ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from trtllm_disagg.tools.plan.comparison import LayoutComparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layout_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` simulates and `bench strategies` measures: a model, its traffic and limits, and engines."""
    add, configs = parser.add_argument, Path("engine_configs/modelled")
    text = "directory with a tokenizer and a config.json"
    add("--model", type=Path, required=True, metavar="DIR", help=text)
    add("--slo", metavar="LIMITS", help="milliseconds that an answer may take (default: ttft=500,tpot=30)")
    add("--workers", metavar="N,...", help="workers of a layout, all roles together (default: 2,4)")
    add("--workloads", metavar="NAME,...", help="chat, rag, reasoning, agentic, bursts, trace (default: all)")
    add("--trace", type=Path, metavar="FILE", help="the workload trace: lines of a Mooncake trace")
    text = "agg.yaml, prefill.yaml and decode.yaml, of as many GPUs each (default: %(default)s)"
    add("--engine-configs", type=Path, default=configs, metavar="DIR", help=text)
    text = 'over the YAML files of all roles, as \'{"modelled": {"system": "h200_sxm"}}\''
    add("--override-engine-args", default="", metavar="JSON", help=text)


def run(args: argparse.Namespace) -> ExitCode:
    # Imported here: `--help` needs no tables.
    import msgspec

    from trtllm_disagg.console import Console
    from trtllm_disagg.processes.steadily import without_silence
    from trtllm_disagg.tools.plan.comparison import compare_layouts
    from trtllm_disagg.tools.plan.layouts import DEFAULT_WORKERS, one_of_each, worker_counts
    from trtllm_disagg.tools.plan.modelled_gpus import Engines
    from trtllm_disagg.tools.plan.slo import slo_of
    from trtllm_disagg.tools.plan.workloads import chosen_workloads

    counts, slo = worker_counts(args.workers or DEFAULT_WORKERS), slo_of(args.slo)
    files = args.engine_configs, one_of_each(max(counts), 1)
    engines = Engines.read("modelled", args.model, *files, args.override_engine_args)
    workloads = list(chosen_workloads(args.workloads, args.trace, engines.longest).values())
    with without_silence(lambda text: print(text, file=sys.stderr, flush=True), "simulating"):
        compared = compare_layouts(engines, counts, workloads, slo)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(compared)).decode())
        return ExitCode.DONE
    console = Console(paper=100)
    for each in compared:
        on_gpus = f"{each.workload} on {each.gpus} GPUs"
        console.paragraph(f"{on_gpus} ({each.description}): up to which rate {each.slo}\n")
        console.print(_under_slo(each))
        console.paragraph(
            f"\n{on_gpus}: the best layout by limits, and its lead over the other kind. A lone request has TTFT "
            f"{each.ttft_alone:.3g} ms and TPOT {each.tpot_alone:.3g} ms\n"
        )
        console.print(_by_limits(each), end="\n\n")
    for each in compared:
        console.paragraph(each.sentence())
    return ExitCode.DONE


def _under_slo(compared: LayoutComparison) -> Table:
    from rich.table import Table

    table = Table("layout", box=None)
    for header in ("requests/s", "tok/s/GPU", "TTFT p50", "TPOT p50"):
        table.add_column(header, justify="right")
    for name, result in compared.layouts.items():
        row = (
            f"{result.rate:.3g}",
            f"{result.tokens_s_gpu:.0f}",
            f"{result.ttft:.3g} ms",
            f"{result.tpot:.3g} ms",
        )
        table.add_row(name, *(row if result.rate else ("none", "", "", "")))
    return table


def _by_limits(compared: LayoutComparison) -> Table:
    from rich.table import Table

    from trtllm_disagg.tools.plan.comparison import TOKEN_FACTORS

    table = Table("", box=None)
    rows: dict[float, list[str]] = {}
    for each in compared.by_limits:
        rows.setdefault(each.ttft, []).append(str(each.lead or "none"))
    limits = list(dict.fromkeys(each.tpot for each in compared.by_limits))
    for tpot, factor in zip(limits, TOKEN_FACTORS, strict=True):
        table.add_column(f"TPOT\n{tpot:g} ms\n{factor:g}x")
    for ttft, leads in rows.items():
        table.add_row(f"TTFT {ttft:g} ms", *leads)
    return table
