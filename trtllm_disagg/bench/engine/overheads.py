"""What the embedded engine costs beside the model: time around a step, the LLM API, memory. One thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_disagg.bench.engine.contestants import alone
from trtllm_disagg.bench.engine.measurement_plan import Plan, computed_in
from trtllm_disagg.bench.figures import Figure, Section
from trtllm_disagg.bench.models import ITEM_BYTES, SIZES, Size
from trtllm_disagg.bench.report import Say

#: The API does not know how large the model is; beside a small one's step its own time shows best.
_TTFT_SIZE = SIZES["1M"]
_TTFT_PROMPTS, _TTFT_TOKENS, _TTFT_WARM_UP = 100, 32, 5
_STREAMED_TOKENS = 32
_FIXED_BYTES = 400e6


@dataclass(frozen=True, slots=True)
class Overheads:
    """One size and dtype. Medians; seconds and bytes."""

    size: Size
    dtype: str
    batch: int
    step: float
    forward: float
    ipc: float
    cpu_per_token: float
    resident: float
    pool: float

    @property
    def name(self) -> str:
        return f"{self.size.name} {self.dtype}"

    @property
    def share(self) -> float:
        """Percent of a step, sent and all, that is not the forward."""
        whole = self.step + self.ipc
        return 100 * (whole - self.forward) / whole

    @property
    def weights(self) -> float:
        return self.size.parameters * ITEM_BYTES[computed_in(self.dtype)]

    @property
    def allowed(self) -> float:
        return 1.25 * self.weights + self.pool + _FIXED_BYTES


def measure_overheads(plan: Plan, size: Size, dtype: str, cache: Path, say: Say) -> Overheads:
    batch = max(plan.batches)
    contexts = plan.prompts(size, batch, plan.decode_prompt, "decode")
    short = plan.prompts(size, batch, _TTFT_TOKENS, "stream")
    say(f"{size.name} {dtype}: steps without the API")
    with alone("OwnEngine", plan, size, dtype, cache) as core:
        split = core.call("split", contexts, 2 * plan.steps)
    say(f"{size.name} {dtype}: {batch} streams through the API")
    with alone("LlmApi", plan, size, dtype, cache) as api:
        streamed = api.call("stream", short, _STREAMED_TOKENS)
        # Once more with the longest rows, so that the pool has been written to.
        api.call("stream", contexts, 2)
        memory = api.call("memory")
    step, forward, ipc = (float(np.median(split[part])) for part in ("step", "forward", "ipc"))
    pool = memory["pool_tokens"] * size.kv_bytes_per_token(dtype)
    cpu = streamed["cpu_per_token"]
    return Overheads(size, dtype, batch, step, forward, ipc, cpu, memory["resident"], pool)


def measure_added_ttft(plan: Plan, cache: Path, say: Say) -> float:
    """Seconds to the first token through the LLM API beyond those of the core alone, prompt by prompt in turn."""
    say("first tokens with and without the API")
    size = _TTFT_SIZE
    prompts = plan.prompts(size, _TTFT_PROMPTS, _TTFT_TOKENS, "ttft")
    with (
        alone("OwnEngine", plan, size, "float32", cache) as core,
        alone("LlmApi", plan, size, "float32", cache) as api,
    ):
        added = [api.call("prefill", prompt) - core.call("prefill", prompt) for prompt in prompts]
    return float(np.median(added[_TTFT_WARM_UP:]))


def section_of(overheads: Overheads) -> Section:
    name, batch = overheads.name, overheads.batch
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
