"""All that one run of `bench engine` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trtllm_disagg.bench.engine import overheads, scaling, speed
from trtllm_disagg.bench.engine.plan import Plan
from trtllm_disagg.bench.figures import Section
from trtllm_disagg.bench.models import SIZES
from trtllm_disagg.bench.report import Say


def measure(
    plan: Plan, parts: Sequence[str], peers: Sequence[str], cache: Path, say: Say, *, is_judged: bool = True
) -> list[Section]:
    """`is_judged`: False for a run that is too short to be held to a target.

    The part `scaling` is a matter of the smallest model, where everything beside the model weighs most.
    """
    kinds = [(SIZES[size], dtype) for size in plan.sizes for dtype in plan.dtypes]
    lengths = f"Prompts of {plan.prompt_tokens} tokens, decode at context {plan.context}"
    sections = [Section(remarks=[f"{lengths}, {plan.rounds} rounds; medians, ratios in pairs."])]
    if "speed" in parts:
        sections += [
            speed.section_of(speed.measure_speeds(plan, *kind, threads, peers, cache, say))
            for kind in kinds
            for threads in plan.threads
        ]
    if "overheads" in parts:
        sections += [
            overheads.section_of(overheads.measure_overheads(plan, *kind, cache, say)) for kind in kinds
        ]
        sections.append(overheads.added_ttft_section(overheads.measure_added_ttft(plan, cache, say)))
    if "scaling" in parts:
        size, dtype = kinds[0][0], kinds[-1][1]
        curves = scaling.measure_scaling(plan, size, dtype, cache, say)
        sections.append(scaling.section_of(f"{size.name} {dtype}", curves))
    return sections if is_judged else [replace(section, is_judged=False) for section in sections]
