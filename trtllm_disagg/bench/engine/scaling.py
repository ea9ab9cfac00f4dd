"""How a decode step grows with batch, context and pool, and what a KV block costs in larger and larger pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_disagg.bench.child_process import ChildProcess
from trtllm_disagg.bench.engine.block_costs import costs_per_block
from trtllm_disagg.bench.engine.contestants import alone
from trtllm_disagg.bench.engine.own_engine import TOKENS_PER_BLOCK
from trtllm_disagg.bench.engine.plan import Plan
from trtllm_disagg.bench.engine.targets import judged
from trtllm_disagg.bench.figures import Figure
from trtllm_disagg.bench.models import Size
from trtllm_disagg.bench.plot import Lines
from trtllm_disagg.bench.report import Say

#: Of the curves along which something else grows.
_BATCH = 8
_PASSES = 3


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by what grows."""

    points: dict[int, float]

    @property
    def ends(self) -> float:
        """The last over the first."""
        values = list(self.points.values())
        return values[-1] / values[0]

    @property
    def per_doubling(self) -> float:
        """The last over the one before, for twice as much."""
        (before, earlier), (now, later) = list(self.points.items())[-2:]
        return float((later / earlier) ** (1 / np.log2(now / before)))


@dataclass(frozen=True, slots=True)
class Scaling:
    size: Size
    dtype: str
    batch: Curve
    context: Curve
    pool: Curve
    lookup: Curve
    allocation: Curve

    @property
    def name(self) -> str:
        return f"{self.size.name} {self.dtype}"


def measure_scaling(plan: Plan, size: Size, dtype: str, cache: Path, say: Say) -> Scaling:
    """One thread."""

    def step(core: ChildProcess, batch: int, context: int) -> float:
        say(f"{size.name} {dtype}: batch {batch}, context {context}")
        prompts = plan.prompts(size, batch, context - plan.steps // 2, f"scaling {context}")
        return float(np.median(core.call("decode", prompts, plan.steps)))

    def step_in_pool(core: ChildProcess, blocks: int) -> float:
        say(f"{size.name} {dtype}: pool of {blocks} blocks")
        core.call("rebuild", blocks)
        return step(core, _pool_batch(plan), plan.context)

    rows = max(_BATCH, *plan.scaling_batches)
    tokens = max(plan.scaling_contexts) + plan.steps + TOKENS_PER_BLOCK
    with alone("OwnEngine", plan, size, dtype, cache, rows=rows, tokens=tokens) as core:
        batch = _best(plan.scaling_batches, lambda rows: step(core, rows, plan.context))
        context = _best(plan.scaling_contexts, lambda tokens: step(core, _BATCH, tokens))
        pool = _best(plan.scaling_pools, lambda blocks: step_in_pool(core, blocks))
    say("lookup and allocation of KV blocks")
    costs = {blocks: costs_per_block(blocks) for blocks in plan.block_pools}
    lookup, allocation = (
        Curve({blocks: cost[number] for blocks, cost in costs.items()}) for number in range(2)
    )
    return Scaling(size, dtype, batch, context, pool, lookup, allocation)


def _best(xs: Sequence[int], measure: Callable[[int], float]) -> Curve:
    """Of some passes over all points: what disturbs one of them is gone in the next."""
    passes = [[measure(x) for x in xs] for _ in range(_PASSES)]
    return Curve(dict(zip(xs, map(min, zip(*passes, strict=True)), strict=True)))


def _pool_batch(plan: Plan) -> int:
    """As many rows as fit into the smallest pool."""
    return min(_BATCH, min(plan.scaling_pools) * TOKENS_PER_BLOCK // (2 * plan.context))


def figures_of(scaling: Scaling) -> list[Figure]:
    name = scaling.name
    steps = {"batch": scaling.batch, "context": scaling.context, "pool of blocks": scaling.pool}
    blocks = {"lookup": scaling.lookup, "allocation": scaling.allocation}
    return [
        *(
            Figure(f"{name} step, {what} {x}", 1e3 * seconds, "ms")
            for what, curve in steps.items()
            for x, seconds in curve.points.items()
        ),
        judged(f"{name} step, twice the batch", scaling.batch.per_doubling, "x"),
        judged(f"{name} step, twice the context", scaling.context.per_doubling, "x"),
        judged(f"{name} step, largest pool / smallest", scaling.pool.ends, "x"),
        *(
            Figure(f"{what} in a pool of {x} blocks", 1e6 * seconds, "us/block")
            for what, curve in blocks.items()
            for x, seconds in curve.points.items()
        ),
        *(judged(f"{what}, largest pool / smallest", curve.ends, "x") for what, curve in blocks.items()),
    ]


def panels_of(scaling: Scaling) -> list[Lines]:
    def line(title: str, x_label: str, unit: str, factor: float, **curves: Curve) -> Lines:
        points = {
            name: {x: factor * seconds for x, seconds in curve.points.items()}
            for name, curve in curves.items()
        }
        return Lines(f"{title}, {unit}", x_label, points)

    name = scaling.name
    return [
        line(f"{name}: step against batch", "rows", "ms", 1e3, step=scaling.batch),
        line(f"{name}: step against context", "tokens a row", "ms", 1e3, step=scaling.context),
        line(f"{name}: step against the pool", "KV blocks", "ms", 1e3, step=scaling.pool),
        line(
            "a KV block's cost against the pool",
            "KV blocks",
            "us",
            1e6,
            lookup=scaling.lookup,
            allocation=scaling.allocation,
        ),
    ]
