"""PNG plots of what was measured; matplotlib comes with the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtllm_disagg.bench.kv_pulls import MEMCPY, PATTERNS, PullTimes, pull_of
from trtllm_disagg.errors import ConfigError

_WIDTH = 0.8


def require_matplotlib() -> None:
    """Raise ConfigError before anything is measured, not after."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is not installed; pip install 'trtllm-disagg[bench]'")


def plot_transfer(results: Sequence[PullTimes], path: Path) -> None:
    labels = [f"{times.shape.name}\n{times.backend}" for times in results]
    bars = {
        MEMCPY: [times.rate(MEMCPY).median for times in results],
        **{pull_of(p): [times.rate(pull_of(p)).median for times in results] for p in PATTERNS},
    }
    _grouped_bars([("GiB/s", labels, bars)], "KV pull between two processes", path)


def plot_bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """One panel a quantity: panels[quantity][series][label] -> height."""
    _grouped_bars(
        [
            (
                quantity,
                list(next(iter(series.values()))),
                {name: list(v.values()) for name, v in series.items()},
            )
            for quantity, series in panels.items()
        ],
        title,
        path,
    )


def _grouped_bars(
    panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]], title: str, path: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 3 * len(panels)), squeeze=False, layout="constrained"
    )
    for axis, (quantity, labels, bars) in zip(axes[:, 0], panels, strict=True):
        _bars(axis, labels, bars)
        axis.set_ylabel(quantity)
        axis.set_xticks(range(len(labels)), labels)
    # Above the bars: there is no corner of the panel that no bar may reach.
    axes[0, 0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(panels[0][2]), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _bars(axis: Any, labels: Sequence[str], bars: Mapping[str, Sequence[float]]) -> None:
    width = _WIDTH / len(bars)
    for number, (name, heights) in enumerate(bars.items()):
        places = [i + (number - (len(bars) - 1) / 2) * width for i in range(len(labels))]
        axis.bar(places, heights, width, label=name)
