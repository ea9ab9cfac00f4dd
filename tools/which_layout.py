"""Makes the page which-layout of the reference: under which limits separate workers are better, for five models and
GPUs and every workload. It simulates like `trtllm-disagg plan`, and takes minutes.

    python -m tools.which_layout [--workers 4]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trtllm_disagg.tools.plan.comparison import (
    FIRST_TOKEN_FACTORS,
    TOKEN_FACTORS,
    LayoutLead,
    LayoutSimulation,
)
from trtllm_disagg.tools.plan.layouts import one_of_each
from trtllm_disagg.tools.plan.modelled_gpus import Engines
from trtllm_disagg.tools.plan.workloads import BUILT_IN

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
#: (model, GPU, arguments over those of engine_configs/modelled).
_SERVED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", "h100_sxm", {}),
    ("qwen3-32b-fp8", "h100_sxm", {}),
    ("llama-3.1-70b-fp8", "h200_sxm", {"tensor_parallel_size": 2}),
    ("gpt-oss-120b", "b200_sxm", {}),
    ("qwen3-235b-a22b-fp8", "h200_sxm", {"tensor_parallel_size": 4, "moe_expert_parallel_size": 4}),
)
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
    for model, system, given in _SERVED:
        override = json.dumps({**given, "modelled": {"model": model, "system": system}})
        read = Engines.read("modelled", options.model, _CONFIGS, one_of_each(options.workers, 1), override)
        layouts, workers = one_of_each(options.workers, read.gpus_per_worker), read.workers()
        for name, traffic in BUILT_IN.items():
            simulated = LayoutSimulation(layouts, traffic, workers)
            alone = f"{simulated.first_token_ms:.3g} ms, {simulated.token_ms:.3g} ms"
            limits = [(first, token) for first in FIRST_TOKEN_FACTORS for token in TOKEN_FACTORS]
            own = {each: simulated.lead(simulated.slo(*each)) for each in limits}
            leads.setdefault(name, {})[read.subject()] = alone, own
            print(read.subject(), name, flush=True)
    draw(leads, options.out / f"{NAME}.png")
    page = "\n".join(_page(leads, options.workers)) + "\n"
    (options.out / f"{NAME}.md").write_text(page, encoding="utf-8")


_HEAD = """\
# Which layout, by simulation

<!-- Made by tools/which_layout.py; do not edit. -->

Should each of {workers} workers do both phases (`{workers} agg`), or some prefill and others decode (`2P2D`)? It
depends on how near the limits of an answer are to the times of a lone request. The page compares the rate up to
which nine of ten answers keep both limits: `2P2D 1.6x` has 1.6 times the rate of the best agg layout. "alike": less
than 10 % apart; "alone": the other kind keeps these limits at no rate; "-": no layout does.

Nothing here was measured. It is an event simulation on the step times of modelled GPUs, without our own software.
Both orders are alike in it. The simulation finds every repeated prefix in a cache, which favours agents.
`trtllm-disagg plan` does the same for your model, traffic and limits in seconds; how far it agrees with
deployments of the modelled engine: [log](../log/simulation.md).

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
