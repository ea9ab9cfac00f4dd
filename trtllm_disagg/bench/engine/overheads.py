"""What the embedded engine costs beside the model: time around a step, the LLM API, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_disagg.bench.engine.contestants import CONTESTANTS, EMBEDDED
from trtllm_disagg.bench.engine.plan import Plan, Size
from trtllm_disagg.bench.engine.remote import Remote, Start
from trtllm_disagg.bench.engine.targets import judged
from trtllm_disagg.bench.figures import Figure

_TTFT_PROMPTS, _TTFT_TOKENS = 40, 32
_STREAMED_PROMPT, _STREAMED_TOKENS = 32, 32
_FIXED_BYTES = 400e6
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Overheads:
    """One size and dtype, one thread. Medians; seconds and bytes."""

    size: Size
    dtype: str
    batch: int
    step: float
    forward: float
    ipc: float
    added_ttft: float
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
        return self.size.parameters * _ITEM_BYTES[self.dtype]

    @property
    def allowed(self) -> float:
        return 1.25 * self.weights + self.pool + _FIXED_BYTES


def measure_overheads(
    plan: Plan, size: Size, dtype: str, cache: Path, say: Callable[[str], None]
) -> Overheads:
    contestant = CONTESTANTS[EMBEDDED]
    batch = max(plan.batches)
    start = Start(
        str(contestant.checkpoint(cache, size, dtype)), dtype, 1, size.vocab_size, batch, plan.longest
    )
    environment = contestant.environment | {"OMP_NUM_THREADS": "1"}

    def ask(factory: str, method: str, *arguments: Any) -> Any:
        say(f"{size.name} {dtype}: {method}")
        with Remote(f"trtllm_disagg.bench.engine.{factory}", start, environment) as remote:
            remote.await_ready()
            return remote.call(method, *arguments)

    contexts = plan.prompts(size, batch, plan.decode_prompt, "decode")
    split = ask("own_overheads:OwnOverheads", "split", contexts, 2 * plan.steps)
    short = plan.prompts(size, _TTFT_PROMPTS, _TTFT_TOKENS, "ttft")
    added = ask("llm_api:LlmApi", "added_ttft", short)
    streamed = ask(
        "llm_api:LlmApi", "stream", plan.prompts(size, batch, _STREAMED_PROMPT, "stream"), _STREAMED_TOKENS
    )
    return Overheads(
        size,
        dtype,
        batch,
        step=float(np.median(split["step"])),
        forward=float(np.median(split["forward"])),
        ipc=float(np.median(split["ipc"])),
        added_ttft=float(np.median(added)),
        cpu_per_token=streamed["cpu_per_token"],
        resident=streamed["resident"],
        pool=streamed["pool_tokens"] * size.kv_bytes_per_token(_ITEM_BYTES[dtype]),
    )


def figures_of(overheads: Overheads) -> list[Figure]:
    name, batch = overheads.name, overheads.batch
    return [
        Figure(f"{name} step at batch {batch}", 1e3 * overheads.step, "ms"),
        Figure(f"{name} scheduler and sampling of it", 1e6 * (overheads.step - overheads.forward), "us"),
        Figure(f"{name} IPC of it", 1e6 * overheads.ipc, "us"),
        judged(f"{name} scheduler, sampling and IPC, share of a step at batch {batch}", overheads.share, "%"),
        judged(f"{name} added to TTFT by the LLM API", 1e3 * overheads.added_ttft, "ms"),
        judged(f"{name} worker CPU per token", 1e6 * overheads.cpu_per_token, "us"),
        Figure(f"{name} resident", overheads.resident / 1e6, "MB"),
        Figure(f"{name} weights", overheads.weights / 1e6, "MB"),
        Figure(f"{name} KV pool", overheads.pool / 1e6, "MB"),
        judged(
            f"{name} resident / (1.25 x weights + KV pool + 400 MB)",
            overheads.resident / overheads.allowed,
            "x",
        ),
    ]
