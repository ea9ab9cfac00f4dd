"""How a decode step grows with batch, context and pool, and what a KV block costs in larger and larger pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from trtllm_disagg.bench.child_process import ChildProcess
from trtllm_disagg.bench.engine.contestants import alone
from trtllm_disagg.bench.engine.measurement_plan import Plan
from trtllm_disagg.bench.engine.own_engine import TOKENS_PER_BLOCK
from trtllm_disagg.bench.figures import Figure, Lines, Section
from trtllm_disagg.bench.models import Size
from trtllm_disagg.bench.report import Say
from trtllm_disagg.embedded.kv_cache.block_manager import BlockManager, KvEventLog

#: Of the curves along which something else grows.
_BATCH = 8
_PASSES = 3
_BLOCK_COSTS = ("lookup", "allocation")
#: Stages of a request whose blocks are named, looked up (also one that fits in part), had, and released.
_STAGES = ("keys", "match", "match_start", "acquire", "allocate", "commit", "release")
_REQUEST_BLOCKS = 64
_KNOWN_BLOCKS = _REQUEST_BLOCKS // 2
_REQUESTS = 50


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


def measure_scaling(plan: Plan, size: Size, dtype: str, cache: Path, say: Say) -> dict[str, Curve]:
    """One thread. Keys: batch, context and pool (seconds a step); lookup and allocation (seconds a block)."""

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
    lookup, allocation = (Curve({blocks: cost[n] for blocks, cost in costs.items()}) for n in range(2))
    return {
        "batch": batch,
        "context": context,
        "pool of blocks": pool,
        "lookup": lookup,
        "allocation": allocation,
    }


def _best(xs: Sequence[int], measure: Callable[[int], float]) -> Curve:
    """Of some passes over all points: what disturbs one of them is gone in the next."""
    passes = [[measure(x) for x in xs] for _ in range(_PASSES)]
    return Curve(dict(zip(xs, map(min, zip(*passes, strict=True)), strict=True)))


def _pool_batch(plan: Plan) -> int:
    """As many rows as fit into the smallest pool."""
    return min(_BATCH, min(plan.scaling_pools) * TOKENS_PER_BLOCK // (2 * plan.context))


def costs_per_block(pool: int) -> tuple[float, float]:
    """Seconds, in a pool that is full of other prompts: naming and finding a known block, evicting for a new one.

    They are those of the median request of 2048 tokens of which half is known. There is no model.
    """
    stages = dict(zip(_STAGES, _stage_seconds(pool), strict=True))
    lookup = stages["keys"] + stages["match"] + stages["acquire"]
    return lookup / _KNOWN_BLOCKS, stages["allocate"] / (_REQUEST_BLOCKS - _KNOWN_BLOCKS)


def _stage_seconds(pool: int) -> list[float]:
    """The median request's time in each of _STAGES."""
    events = KvEventLog(100_000, 4096)
    blocks = BlockManager(pool, TOKENS_PER_BLOCK, enable_reuse=True, events=events)
    prompts = pool // _KNOWN_BLOCKS
    for prompt in range(prompts):
        held = blocks.allocate(_KNOWN_BLOCKS)
        blocks.commit(_tokens(prompt, _KNOWN_BLOCKS), held, [], b"")
        blocks.release(held)
        events.take()
    times = []
    for number in range(min(_REQUESTS, max(1, prompts // 4))):
        known = _tokens(prompts - 1 - number, _KNOWN_BLOCKS)  # the newest ones are evicted last
        fresh = _tokens(prompts + number, _REQUEST_BLOCKS)[len(known) :]
        times.append([later - earlier for earlier, later in pairwise(_one_request(blocks, known + fresh))])
        events.take()  # as every step does
    blocks.check()
    return [float(seconds) for seconds in np.median(times, axis=0)]


def _one_request(blocks: BlockManager, prompt: list[int]) -> Iterator[float]:
    """The time before and after each stage."""
    yield time.perf_counter()
    keys = blocks.prompt_keys(prompt, b"")
    yield time.perf_counter()
    known = blocks.match(keys)
    yield time.perf_counter()
    blocks.match_start(keys[len(known) - 1], prompt[len(known) * TOKENS_PER_BLOCK :][:TOKENS_PER_BLOCK], b"")
    yield time.perf_counter()
    blocks.acquire(known)
    yield time.perf_counter()
    fresh = blocks.allocate(_REQUEST_BLOCKS - len(known))
    yield time.perf_counter()
    blocks.commit(prompt, known + fresh, keys[: len(known)], b"")
    yield time.perf_counter()
    blocks.release(known + fresh)
    yield time.perf_counter()


def _tokens(prompt: int, blocks: int) -> list[int]:
    """No two prompts have a block in common."""
    start = prompt * _REQUEST_BLOCKS * TOKENS_PER_BLOCK
    return list(range(start, start + blocks * TOKENS_PER_BLOCK))


def section_of(name: str, curves: dict[str, Curve]) -> Section:
    """`name`: of the model."""
    steps = {what: curve for what, curve in curves.items() if what not in _BLOCK_COSTS}
    blocks = {what: curves[what] for what in _BLOCK_COSTS}
    figures = [
        *(
            Figure(f"{name} step, {what} {x}", 1e3 * seconds, "ms")
            for what, curve in steps.items()
            for x, seconds in curve.points.items()
        ),
        Figure(f"{name} step, twice the batch", curves["batch"].per_doubling, "x"),
        Figure(f"{name} step, twice the context", curves["context"].per_doubling, "x"),
        Figure(f"{name} step, largest pool / smallest", curves["pool of blocks"].ends, "x"),
        *(
            Figure(f"{what} in a pool of {x} blocks", 1e6 * seconds, "us/block")
            for what, curve in blocks.items()
            for x, seconds in curve.points.items()
        ),
        *(Figure(f"{what}, largest pool / smallest", curve.ends, "x") for what, curve in blocks.items()),
    ]
    panels = [Lines(f"{name}: step, ms", what, {"": _scaled(curve, 1e3)}) for what, curve in steps.items()]
    costs = {what: _scaled(curve, 1e6) for what, curve in blocks.items()}
    panels.append(Lines("a KV block's cost, us", "blocks of the pool", costs))
    return Section(f"Growth, {name}, one thread", figures=figures, panels=panels)


def _scaled(curve: Curve, factor: float) -> dict[int, float]:
    return {x: factor * seconds for x, seconds in curve.points.items()}
