"""How a decode step grows with batch, context and pool, and what a KV block costs in larger and larger pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_disagg.bench.engine.contestants import CONTESTANTS, EMBEDDED
from trtllm_disagg.bench.engine.own_engine import TOKENS_PER_BLOCK
from trtllm_disagg.bench.engine.plan import Plan, Size
from trtllm_disagg.bench.engine.remote import Remote, Start
from trtllm_disagg.bench.engine.targets import judged
from trtllm_disagg.bench.figures import Figure

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


def measure_scaling(plan: Plan, size: Size, dtype: str, cache: Path, say: Callable[[str], None]) -> Scaling:
    """One thread."""
    longest = max(plan.scaling_contexts) + plan.steps
    start = Start(
        str(CONTESTANTS[EMBEDDED].checkpoint(cache, size, dtype)),
        dtype,
        1,
        size.vocab_size,
        max(_BATCH, *plan.scaling_batches),
        longest + TOKENS_PER_BLOCK,
    )
    environment = CONTESTANTS[EMBEDDED].environment | {"OMP_NUM_THREADS": "1"}

    def step(remote: Remote, batch: int, context: int) -> float:
        say(f"{size.name} {dtype}: batch {batch}, context {context}")
        prompts = plan.prompts(size, batch, context - plan.steps // 2, f"scaling {context}")
        return float(np.median(remote.call("decode", prompts, plan.steps)))

    def step_in_pool(remote: Remote, blocks: int) -> float:
        say(f"{size.name} {dtype}: pool of {blocks} blocks")
        remote.call("rebuild", blocks)
        return step(remote, _pool_batch(plan), plan.context)

    def costs(remote: Remote, blocks: int) -> dict[str, float]:
        say(f"pool of {blocks} blocks: lookup and allocation")
        return dict(remote.call("per_block", blocks))

    with Remote("trtllm_disagg.bench.engine.own_engine:OwnEngine", start, environment) as remote:
        remote.await_ready()
        batch = _best(plan.scaling_batches, lambda rows: step(remote, rows, plan.context))
        context = _best(plan.scaling_contexts, lambda tokens: step(remote, _BATCH, tokens))
        pool = _best(plan.scaling_pools, lambda blocks: step_in_pool(remote, blocks))
    with Remote("trtllm_disagg.bench.engine.block_costs:BlockCosts", start, environment) as remote:
        remote.await_ready()
        per_block = {blocks: costs(remote, blocks) for blocks in plan.block_pools}
    lookup, allocation = (
        Curve({blocks: cost[what] for blocks, cost in per_block.items()}) for what in ("lookup", "allocation")
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
