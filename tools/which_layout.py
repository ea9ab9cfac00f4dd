"""Makes the page which-layout of the reference: under which limits separate workers should be better, for the models,
GPUs and workloads of the page which-strategy. It simulates like `bench strategies --foresee`, and takes minutes.

    python -m tools.which_layout [--workers 4]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.which_strategy import FOLDER, link_from
from tools.which_strategy_runs import PAIRS
from tools.which_strategy_trace import write_trace
from trtllm_disagg.tools.bench.strategies.layout_comparison import (
    FIRST_TOKEN_FACTORS,
    TOKEN_FACTORS,
    LayoutLead,
    LayoutSimulation,
    layouts,
)
from trtllm_disagg.tools.bench.strategies.planning import Engines
from trtllm_disagg.tools.bench.strategies.workloads import BUILT_IN, Traffic, trace

NAME = "which-layout"
#: The lead, in doublings, that has the darkest colour.
_MOST_DOUBLINGS = 2
_CONFIGS = Path("engine_configs/modelled")
#: By the limits of TTFT and TPOT, as factors of what a lone request takes.
Leads = dict[tuple[float, float], LayoutLead | None]
#: By workload and subject: what a lone request takes, as text, and the leads.
ByWorkload = dict[str, dict[str, tuple[str, Leads]]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/demo-model"), help="with a config.json")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    leads: ByWorkload = {}
    for pair in PAIRS:
        engines = Engines.read(
            "modelled", options.model, _CONFIGS, layouts(options.workers, 1), pair.override()
        )
        arms, workers = layouts(options.workers, engines.gpus_per_worker), engines.workers()
        for name, traffic in _workloads(engines.longest).items():
            told = LayoutSimulation(arms, traffic, workers)
            alone = f"{told.first_token_ms:.3g} ms, {told.token_ms:.3g} ms"
            leads.setdefault(name, {})[engines.subject()] = alone, _leads(told)
            print(engines.subject(), name, flush=True)
    write_page(leads, options.workers, options.out)


def write_page(leads: ByWorkload, workers: int, out: Path) -> None:
    draw(leads, out / f"{NAME}.png")
    (out / f"{NAME}.md").write_text("\n".join(_page(leads, workers)) + "\n", encoding="utf-8")
    link_from(out / "index.md", NAME, "under which limits separate workers should be better, by simulation")


def _workloads(longest: int) -> dict[str, Traffic]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.jsonl"
        write_trace(file)
        return BUILT_IN | {"trace": trace(file, longest)}


def _leads(told: LayoutSimulation) -> Leads:
    return {
        (first, token): told.lead(told.slo(first, token))
        for first in FIRST_TOKEN_FACTORS
        for token in TOKEN_FACTORS
    }


_HEAD = """\
# Which layout, by simulation

<!-- Made by tools/which_layout.py; do not edit. -->

Of {workers} workers, should each do both (`{workers} agg`), or some prefill and others decode (`2P2D`)? It depends on
how near the limits of an answer are to what a request takes that is alone. Compared is the rate up to which nine of
ten answers keep both limits: `2P2D 1.6x` has 1.6 times the rate of the best layout of the other kind. Alike are
layouts less than 10 % apart; alone: the other kind keeps these limits at no rate; -: no layout does.

Nothing here was measured. It is an event simulation on the step times of modelled GPUs, without our own software;
both orders are alike in it, and of each prompt all that an earlier one began with is in a cache, which is kind to
agents and to the trace. `trtllm-disagg bench strategies --foresee` does it for your own model, traffic and limits in
seconds. What was measured: [which strategy](which-strategy.md); how far both agree: [log](../log/simulation.md).

![For each workload a panel: a row for each model and limit of TTFT, a column for each limit of TPOT. Blue: separate
workers lead; red: workers that do both.](which-layout.png)

In how many cases separate workers are better, of five models and GPUs with three limits of TTFT each:
"""


def _page(leads: ByWorkload, workers: int) -> Iterator[str]:
    headers = " | ".join(f"TPOT {factor:g}x" for factor in TOKEN_FACTORS)
    rule = "---|" * len(TOKEN_FACTORS)
    yield _HEAD.format(workers=workers)
    yield f"| traffic | {headers} |"
    yield f"|---|{rule}"
    for name, by_subject in leads.items():
        yield (
            f"| [{name}](#{name}) | "
            + " | ".join(_share(by_subject, factor) for factor in TOKEN_FACTORS)
            + " |"
        )
    for name, by_subject in leads.items():
        yield f"\n## {name}\n"
        yield f"| served, and TTFT and TPOT alone | TTFT | {headers} |"
        yield f"|---|---|{rule}"
        for subject, (alone, own) in by_subject.items():
            for first in FIRST_TOKEN_FACTORS:
                served = f"{subject}: {alone}" if first == FIRST_TOKEN_FACTORS[0] else ""
                cells = " | ".join(_cell(own[first, token]) for token in TOKEN_FACTORS)
                yield f"| {served} | {first:g}x | {cells} |"


def draw(leads: ByWorkload, file: Path) -> None:
    """Draws a panel for each workload: a row for each model and limit of TTFT, a column for each limit of TPOT."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = max(len(by_subject) for by_subject in leads.values()) * len(FIRST_TOKEN_FACTORS)
    figure, axes = pyplot.subplots(
        2,
        -(-len(leads) // 2),
        figsize=(11, 0.42 * rows + 1.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, by_subject) in zip(axes.flat, leads.items(), strict=False):
        cells = [[_sided(own[first, token]) for token in TOKEN_FACTORS] for first, own in _rows(by_subject)]
        shown = axis.imshow(cells, cmap="RdBu", vmin=-_MOST_DOUBLINGS, vmax=_MOST_DOUBLINGS, aspect="auto")
        axis.set_facecolor("#dddddd")
        axis.set_title(name, fontsize=10)
        axis.set_xticks(range(len(TOKEN_FACTORS)), [f"{factor:g}x" for factor in TOKEN_FACTORS], fontsize=7)
        labels = [
            f"{subject.split(' on ')[0]}, {first:g}x"
            for subject in by_subject
            for first in FIRST_TOKEN_FACTORS
        ]
        axis.set_yticks(range(len(labels)), labels, fontsize=7)
    for axis in axes.flat[len(leads) :]:
        axis.set_visible(False)
    bar = figure.colorbar(shown, ax=axes, shrink=0.6, ticks=(-_MOST_DOUBLINGS, 0, _MOST_DOUBLINGS))
    most = f"{2**_MOST_DOUBLINGS}x"
    bar.ax.set_yticklabels([f"agg leads\n{most}", "alike", f"separate\nworkers lead\n{most}"], fontsize=7)
    figure.supxlabel(
        "limit of TPOT, by what a request takes that is alone; rows: model, and limit of TTFT", fontsize=8
    )
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _rows(by_subject: dict[str, tuple[str, Leads]]) -> Iterator[tuple[float, Leads]]:
    for _, own in by_subject.values():
        for first in FIRST_TOKEN_FACTORS:
            yield first, own


def _sided(lead: LayoutLead | None) -> float:
    """Doublings by which separate workers lead; below 0: by which agg leads."""
    if lead is None:
        return math.nan
    doublings = min(math.log2(lead.ratio or math.inf), _MOST_DOUBLINGS)
    return doublings if lead.is_separate else -doublings


def _share(by_subject: dict[str, tuple[str, Leads]], token: float) -> str:
    cases = [own[first, token] for _, own in by_subject.values() for first in FIRST_TOKEN_FACTORS]
    return f"{sum(lead is not None and lead.is_separate and lead.is_clear for lead in cases)} of {len(cases)}"


def _cell(lead: LayoutLead | None) -> str:
    if lead is None:
        return "-"
    return f"**{lead}**" if lead.is_separate and lead.is_clear else str(lead)


if __name__ == "__main__":
    main()
