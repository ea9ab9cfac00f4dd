"""The six workloads of the post "NanoGPT: Disaggregated Prefill and Decode", its results, and larger scales."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

#: Tokens of a prefill tile, the minimum per step: with fewer, prompts could not progress beside decode rows.
TILE = 32
#: The post's monolithic scheduler had 16 tokens a step for prompts of up to 40.
_CHUNK_SHARE = 16 / 40
#: With fewer prompt tokens in a step, reading the weights costs more than the work.
_LEAST_PREFILL = 2 * TILE
#: Smallest chunk that costs about the same per token as an uncut prompt; chunks of 32 or 64 cost a fifth more.
_LEAST_EFFICIENT_CHUNK = 3 * TILE
_LONGEST_PROMPT = 40


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    max_batch_size: int = 4
    #: Milliseconds between arrivals; 0: all together.
    gap: float = 0.0

    @property
    def sizes(self) -> str:
        gap = f", every {self.gap:.0f} ms" if self.gap else ""
        batch = f", batch {self.max_batch_size}" if self.max_batch_size != 4 else ""
        return f"  {self.name}: {self.num_requests} x {self.prompt_tokens}p/{self.output_tokens}g{gap}{batch}"

    @property
    def warm_up(self) -> Scenario:
        """A short version, which connects the engines and makes their buffers grow."""
        return replace(self, num_requests=min(2, self.num_requests), output_tokens=2)

    def prompts(self, repetition: int, vocab_size: int) -> list[list[int]]:
        """Random token ids, different in each repetition."""
        source = random.Random(f"{self.name} {repetition}")
        return [
            [source.randrange(2, vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_requests)
        ]


#: The post omits the output tokens of batch_pressure (8 follows from its 721 tok/s), and the gap.
SEED_SCENARIOS = (
    Scenario("smoke", 4, 16, 8),
    Scenario("staggered_arrivals", 8, 24, 10, gap=10.0),
    Scenario("batch_pressure", 12, 16, 8, max_batch_size=2),
    Scenario("long_prompts", 6, _LONGEST_PROMPT, 8),
    Scenario("long_decode", 6, 16, 32),
    Scenario("stress", 16, 16, 10),
)


#: The post's disaggregated / monolithic. Higher is better for throughput, lower for the others.
SEED_RATIOS: dict[str, dict[str, float]] = {
    "smoke": {"throughput": 0.60, "ttft": 0.89, "latency": 0.96},
    "staggered_arrivals": {"throughput": 1.42, "ttft": 0.47, "latency": 0.57},
    "batch_pressure": {"throughput": 0.98, "ttft": 0.83, "latency": 0.85},
    "long_prompts": {"throughput": 1.62, "ttft": 0.26, "latency": 0.35},
    "long_decode": {"throughput": 1.13, "ttft": 0.55, "latency": 0.68},
    "stress": {"throughput": 1.04, "ttft": 0.73, "latency": 0.76},
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Two factors: for the post's prompts and gaps, and for its answers."""

    name: str
    longest_prompt: int
    output_factor: float

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        factor = self.longest_prompt / _LONGEST_PROMPT
        return tuple(
            replace(
                scenario,
                prompt_tokens=round(scenario.prompt_tokens * factor),
                output_tokens=round(scenario.output_tokens * self.output_factor),
                gap=scenario.gap * factor,
            )
            for scenario in SEED_SCENARIOS
        )

    @property
    def max_seq_len(self) -> int:
        return max(s.prompt_tokens + s.output_tokens for s in self.scenarios)

    @property
    def pool_tokens(self) -> int:
        """Tokens of a KV pool for all requests of a scenario together, so no engine waits for blocks."""
        return max(s.num_requests * (s.prompt_tokens + s.output_tokens + TILE) for s in self.scenarios)

    @property
    def chunk(self) -> int:
        """Prompt tokens per step, in the post's proportion, rounded to tiles."""
        return max(TILE, round(self.longest_prompt * _CHUNK_SHARE) // TILE * TILE)

    @property
    def local_chunk(self) -> int:
        """Prompt tokens per step of a decode engine: the smallest efficient number."""
        return min(_LEAST_EFFICIENT_CHUNK, self.whole_prompt)

    @property
    def whole_prompt(self) -> int:
        """Prompt tokens per step that leave every prompt uncut."""
        return max(_LEAST_PREFILL, self.longest_prompt)


SCALES = {
    scale.name: scale
    for scale in (
        Scale("seed", longest_prompt=_LONGEST_PROMPT, output_factor=1),
        Scale("1k", longest_prompt=1024, output_factor=12.8),
        Scale("4k", longest_prompt=4096, output_factor=12.8),
    )
}
