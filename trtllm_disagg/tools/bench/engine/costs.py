"""Measures with one thread what the embedded engine costs beside the model (time around a step, the LLM API, memory),
how a decode step grows with batch, context and pool, and how the cost of a KV block grows with the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_disagg.engines.embedded.kv_cache.block_manager import BlockManager, KvEventLog
from trtllm_disagg.tools.bench.child_process import ChildProcess
from trtllm_disagg.tools.bench.engine.contestants import started
from trtllm_disagg.tools.bench.engine.measurement_plan import Case, MeasurementPlan, computed_in
from trtllm_disagg.tools.bench.engine.own_engine import TOKENS_PER_BLOCK
from trtllm_disagg.tools.bench.figures import Figure, Lines, Section
from trtllm_disagg.tools.bench.models import ITEM_BYTES, SIZES
from trtllm_disagg.tools.bench.report import Say

#: The batch size of curves along which something else grows.
_BATCH = 8
_PASSES = 3
_BLOCK_COSTS = ("lookup", "allocation")
_REQUEST_BLOCKS = 64
_KNOWN_BLOCKS = _REQUEST_BLOCKS // 2
_REQUESTS = 50

#: The API's own time does not depend on the model's size, and shows best beside a small model's step.
_TTFT_SIZE = SIZES["1M"]
_TTFT_PROMPTS, _TTFT_TOKENS, _TTFT_WARM_UP = 100, 32, 5
_STREAMED_TOKENS = 32
_FIXED_BYTES = 400e6


@dataclass(frozen=True, slots=True)
class Overheads:
    """Medians for one model, in seconds and bytes."""

    case: Case
    step: float
    forward: float
    ipc: float
    cpu_per_token: float
    resident: float
    pool: float

    @property
    def share(self) -> float:
        """Percent of a step and its IPC that is not the forward."""
        whole = self.step + self.ipc
        return 100 * (whole - self.forward) / whole

    @property
    def weights(self) -> float:
        return self.case.size.parameters * ITEM_BYTES[computed_in(self.case.dtype)]

    @property
    def allowed(self) -> float:
        return 1.25 * self.weights + self.pool + _FIXED_BYTES


def measure_overheads(case: Case, say: Say) -> Overheads:
    plan, batch = case.plan, case.plan.largest_batch
    contexts = case.prompts(batch, plan.decode_prompt, "decode")
    short = case.prompts(batch, _TTFT_TOKENS, "stream")
    say(f"{case.model}: steps without the API")
    with started("OwnEngine", case) as core:
        split = core.call("split", contexts, 2 * plan.steps)
    say(f"{case.model}: {batch} streams through the API")
    with started("LlmApi", case) as api:
        cpu = api.call("stream", short, _STREAMED_TOKENS)
        # Long rows write to the pool, so that its memory is resident.
        api.call("stream", contexts, 2)
        memory = api.call("memory")
    step, forward, ipc = (float(np.median(split[part])) for part in ("step", "forward", "ipc"))
    pool = memory["pool_tokens"] * case.size.kv_bytes_per_token(case.dtype)
    return Overheads(case, step, forward, ipc, cpu, memory["resident"], pool)


def measure_added_ttft(plan: MeasurementPlan, cache: Path, say: Say) -> float:
    """Seconds that the LLM API adds to the first token, prompt by prompt in turn with the core alone."""
    say("first tokens with and without the API")
    case = Case(plan, _TTFT_SIZE, "float32", cache)
    prompts = case.prompts(_TTFT_PROMPTS, _TTFT_TOKENS, "ttft")
    with started("OwnEngine", case) as core, started("LlmApi", case) as api:
        added = [api.call("prefill", prompt) - core.call("prefill", prompt) for prompt in prompts]
    return float(np.median(added[_TTFT_WARM_UP:]))


def overheads_section(overheads: Overheads) -> Section:
    name, batch = overheads.case.model, overheads.case.plan.largest_batch
    share = f"{name} scheduler, sampling and IPC, share of a step at batch {batch}"
    resident = f"{name} resident / (1.25 x weights + KV pool + 400 MB)"
    figures = [
        Figure(f"{name} step at batch {batch}", 1e3 * overheads.step, "ms"),
        Figure(f"{name} scheduler and sampling of it", 1e6 * (overheads.step - overheads.forward), "us"),
        Figure(f"{name} IPC of it", 1e6 * overheads.ipc, "us"),
        Figure(share, overheads.share, "%"),
        Figure(f"{name} worker CPU per token", 1e6 * overheads.cpu_per_token, "us"),
        Figure(f"{name} resident", overheads.resident / 1e6, "MB"),
        Figure(f"{name} weights", overheads.weights / 1e6, "MB"),
        Figure(f"{name} KV pool", overheads.pool / 1e6, "MB"),
        Figure(resident, overheads.resident / overheads.allowed, "x"),
    ]
    return Section(f"Beside the model, {name}, one thread", figures=figures)


def added_ttft_section(seconds: float) -> Section:
    return Section("The LLM API", figures=[Figure("added to TTFT by the LLM API", 1e3 * seconds, "ms")])


@dataclass(frozen=True, slots=True)
class Growth:
    """Milliseconds of a step, or microseconds of a KV block, by the size of what grows."""

    points: dict[int, float]

    @property
    def ends(self) -> float:
        """The last value / the first one."""
        values = list(self.points.values())
        return values[-1] / values[0]

    @property
    def per_doubling(self) -> float:
        """The growth factor for twice the size, from the last two points."""
        (before, earlier), (now, later) = list(self.points.items())[-2:]
        return float((later / earlier) ** (1 / np.log2(now / before)))


def measure_scaling(case: Case, say: Say) -> dict[str, Growth]:
    """Keys: batch, context and pool of blocks (steps); lookup and allocation (blocks)."""
    plan = case.plan

    def step(core: ChildProcess, batch: int, context: int) -> float:
        say(f"{case.model}: batch {batch}, context {context}")
        prompts = case.prompts(batch, context - plan.steps // 2, f"scaling {context}")
        return 1e3 * float(np.median(core.call("decode", prompts, plan.steps)))

    def step_in_pool(core: ChildProcess, blocks: int) -> float:
        say(f"{case.model}: pool of {blocks} blocks")
        core.call("rebuild", blocks)
        # As many rows as fit into the smallest pool.
        fitting = min(plan.scaling_pools) * TOKENS_PER_BLOCK // (2 * plan.context)
        return step(core, min(_BATCH, fitting), plan.context)

    rows = max(_BATCH, *plan.scaling_batches)
    tokens = max(plan.scaling_contexts) + plan.steps + TOKENS_PER_BLOCK
    with started("OwnEngine", case, rows=rows, tokens=tokens) as core:
        batch = _best(plan.scaling_batches, lambda rows: step(core, rows, plan.context))
        context = _best(plan.scaling_contexts, lambda tokens: step(core, _BATCH, tokens))
        pool = _best(plan.scaling_pools, lambda blocks: step_in_pool(core, blocks))
    say("lookup and allocation of KV blocks")
    costs = {blocks: costs_per_block(blocks) for blocks in plan.block_pools}
    lookup, allocation = (Growth({blocks: 1e6 * cost[n] for blocks, cost in costs.items()}) for n in range(2))
    steps = {"batch": batch, "context": context, "pool of blocks": pool}
    return steps | {"lookup": lookup, "allocation": allocation}


def _best(xs: Sequence[int], measure: Callable[[int], float]) -> Growth:
    """The best of several passes over all points, so that a short disturbance does not count."""
    passes = [[measure(x) for x in xs] for _ in range(_PASSES)]
    return Growth(dict(zip(xs, map(min, zip(*passes, strict=True)), strict=True)))


def costs_per_block(pool: int) -> tuple[float, float]:
    """Seconds to hash and find a cached block, and to evict one for a new block, in a pool full of other prompts.

    They are those of the median request of 2048 tokens, half of them cached. No model is run.
    """
    events = KvEventLog(100_000, 4096)
    blocks = BlockManager(pool, TOKENS_PER_BLOCK, enable_reuse=True, events=events)
    prompts = pool // _KNOWN_BLOCKS
    for prompt in range(prompts):
        held = blocks.allocate(_KNOWN_BLOCKS)
        blocks.commit(_tokens(prompt, _KNOWN_BLOCKS), held, [], b"")
        blocks.release(held)
        events.take()
    seconds = []
    for number in range(min(_REQUESTS, max(1, prompts // 4))):
        tokens = _tokens(prompts - 1 - number, _KNOWN_BLOCKS)  # the newest ones are evicted last
        tokens += _tokens(prompts + number, _REQUEST_BLOCKS)[len(tokens) :]
        begun = time.perf_counter()
        keys = blocks.prompt_keys(tokens, b"")
        known = blocks.match(keys)
        blocks.acquire(known)
        found = time.perf_counter()
        fresh = blocks.allocate(_REQUEST_BLOCKS - len(known))
        seconds.append((found - begun, time.perf_counter() - found))
        blocks.commit(tokens, known + fresh, keys[: len(known)], b"")
        blocks.release(known + fresh)
        events.take()  # as every step does
    blocks.check()
    lookup, allocation = np.median(seconds, axis=0)
    return float(lookup) / _KNOWN_BLOCKS, float(allocation) / (_REQUEST_BLOCKS - _KNOWN_BLOCKS)


def _tokens(prompt: int, blocks: int) -> list[int]:
    """The tokens of `blocks` blocks; no two prompts share a block."""
    start = prompt * _REQUEST_BLOCKS * TOKENS_PER_BLOCK
    return list(range(start, start + blocks * TOKENS_PER_BLOCK))


def scaling_section(name: str, curves: dict[str, Growth]) -> Section:
    """`name`: the model's."""
    steps = {what: curve for what, curve in curves.items() if what not in _BLOCK_COSTS}
    blocks = {what: curves[what] for what in _BLOCK_COSTS}
    figures = [
        *(
            Figure(f"{name} step, {what} {x}", milliseconds, "ms")
            for what, curve in steps.items()
            for x, milliseconds in curve.points.items()
        ),
        Figure(f"{name} step, twice the batch", curves["batch"].per_doubling, "x"),
        Figure(f"{name} step, twice the context", curves["context"].per_doubling, "x"),
        Figure(f"{name} step, largest pool / smallest", curves["pool of blocks"].ends, "x"),
        *(
            Figure(f"{what} in a pool of {x} blocks", microseconds, "us/block")
            for what, curve in blocks.items()
            for x, microseconds in curve.points.items()
        ),
        *(Figure(f"{what}, largest pool / smallest", curve.ends, "x") for what, curve in blocks.items()),
    ]
    panels = [Lines(f"{name}: step, ms", what, {"": curve.points}) for what, curve in steps.items()]
    costs = {what: curve.points for what, curve in blocks.items()}
    panels.append(Lines("a KV block's cost, us", "blocks of the pool", costs))
    return Section(f"Growth, {name}, one thread", figures=figures, panels=panels)
