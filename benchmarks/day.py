"""A day of load on fixed ratios and on `up --autoscale`: `python -m benchmarks.day 2P3D 5agg auto5 --seconds 480`.

Only the GPU is modelled (`modelled.measured`). In the morning clients send documents (long prompts, short answers), in
the evening chats (short prompts, long answers), at night little. All layouts run side by side. Prints the share of
requests that keep both limits, and GPU seconds used. `--files role` uses the sizes of the shipped prefill.yaml and
decode.yaml (such workers cannot flip), `--files flex` those of flex.yaml.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.http_client import BadAnswerError, Client, completion_request
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.plan import NO_WORKERS, DeploymentConfig
from trtllm_disagg.tools.up.run_dir import scratch_directory
from trtllm_disagg.tools.up.up_command import engine_configs_in

#: At these times a worker keeps the limits up to about 3 documents or 2 chats a second.
STEPS = {"step_ms": 12, "prefill_token_us": 90, "decode_token_us": 900, "kv_pool_tokens": 200_000}
ENGINE = {
    "max_seq_len": 4096,
    "max_batch_size": 64,
    "max_num_tokens": 8192,
    "enable_chunked_prefill": True,
    "kv_cache_config": {"tokens_per_block": 32},
    "modelled": {"measured": STEPS | {"kv_bytes_per_token": 131_072}, "link_gb_per_second": 50},
}
SHIPPED = Path(__file__).parents[1] / "engine_configs" / "modelled"
TTFT, TPOT = 1.0, 0.030


class Use(NamedTuple):
    """One use of the model: tokens of prompt and answer, and its requests per second over the day."""

    prompt: int
    answer: int
    max_rate: float
    min_rate: float
    #: Part of the day with max_rate, 0 to 1.
    peak: float


USES = (Use(3000, 60, 5.0, 0.2, 0.35), Use(300, 350, 4.5, 0.3, 0.75))


def arrivals(use: Use, seconds: float, dice: random.Random) -> Iterator[float]:
    """Seconds of arrival: a Poisson process with the highest rate at the peak."""
    at = 0.0
    while (at := at + dice.expovariate(use.max_rate)) < seconds:
        hill = math.exp(-(((at / seconds - use.peak) / 0.16) ** 2))
        if dice.random() * use.max_rate < use.min_rate + (use.max_rate - use.min_rate) * hill:
            yield at


@dataclass(frozen=True, slots=True)
class Answer:
    at: float
    ttft: float
    tpot: float

    @property
    def is_in_time(self) -> bool:
        return self.ttft <= TTFT and self.tpot <= TPOT


def share_in_time(answers: Sequence[Answer]) -> float:
    return round(sum(each.is_in_time for each in answers) / max(1, len(answers)), 4)


async def ask(client: Client, use: Use, at: float, began: float, seed: int) -> Answer:
    """Send one request at its time. Returns infinite times if it fails."""
    await asyncio.sleep(began + at - time.monotonic())
    dice = random.Random(seed)
    prompt = [dice.randrange(10, 400) for _ in range(use.prompt)]
    try:
        got = await client.ask(completion_request("day", prompt, use.answer) | {"ignore_eos": True}, 120)
    except BadAnswerError:
        return Answer(at, math.inf, math.inf)
    return Answer(at, got.first - got.asked, (got.ended - got.first) / (use.answer - 1))


async def gpu_seconds(deployment: Deployment, used: list[float], ratios: list[str]) -> None:
    """Note GPU seconds: a worker process has a GPU from its start to its end, also when it drains. Never returns."""
    seen_at = time.monotonic()
    while True:
        await asyncio.sleep(0.5)
        now = time.monotonic()
        workers = [each for each in deployment.processes if each.role not in NO_WORKERS and each.is_running]
        used.append(len(workers) * (now - seen_at))
        ratio = " ".join(sorted(each.role[0].upper() for each in workers))
        ratios += [ratio] if ratios[-1:] != [ratio] else []
        seen_at = now


def engine_of(role: str, files: str) -> dict[str, Any]:
    """`files`: `one` config for both roles, or the shipped ones (`role`, `flex`) on the same modelled GPU."""
    if files == "one":
        return ENGINE
    content = yaml.safe_load((SHIPPED / f"{'flex' if files == 'flex' else role}.yaml").read_text())
    return {**content, **{key: ENGINE[key] for key in ("max_seq_len", "modelled")}}


def config_of(layout: str, strategy: str, directory: Path, files: str = "one") -> DeploymentConfig:
    """`layout`: 2P3D, 5agg, or auto5 (autoscaled between one worker of each role and five in all)."""
    pair, alone, auto = (re.fullmatch(p, layout) for p in (r"(\d+)P(\d+)D", r"(\d+)agg", r"auto(\d+)"))
    roles = ("agg",) if alone else ("prefill", "decode")
    engines = directory / f"{layout}-engines"
    engines.mkdir()
    for role in roles:
        transceiver = {} if alone else {"cache_transceiver_config": {"backend": "NIXL"}}
        content = engine_of(role, files if not alone else "one") | transceiver
        (engines / f"{role}.yaml").write_text(yaml.safe_dump(content))
    settings: dict[str, Any] = {}
    if pair:
        settings = {"prefill_workers": int(pair[1]), "decode_workers": int(pair[2])}
    if alone:
        settings = {"agg_workers": int(alone[1])}
    if auto:
        slo = f"ttft={1000 * TTFT:g},tpot={1000 * TPOT:g}"
        settings = {"autoscale": ("--slo", slo, "--max-workers", auto[1], "--interval", "1")}
    strategy = "agg" if alone else strategy
    return DeploymentConfig(
        strategy=strategy,
        model=str(Path(__file__).parents[1] / ".cache" / "demo-model"),
        served_model_name="day",
        run_dir=directory / layout,
        http_port=0,
        engine="modelled",
        engine_configs=engine_configs_in(engines, strategy),
        **settings,
    )


async def day(config: DeploymentConfig, layout: str, seconds: float, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    plan = [(at, use) for use in USES for at in arrivals(use, seconds, dice)]
    used: list[float] = []
    ratios: list[str] = []
    async with running_deployment(config) as deployment, Client.to(deployment.base_url) as client:
        began = time.monotonic()
        watching = asyncio.create_task(gpu_seconds(deployment, used, ratios))
        asking = (ask(client, use, at, began, seed * 1_000_003 + i) for i, (at, use) in enumerate(plan))
        answers = await asyncio.gather(*asking)
        watching.cancel()
    return {
        "layout": layout,
        "requests": len(answers),
        "in time": share_in_time(answers),
        "by hour": [
            share_in_time([each for each in answers if int(24 * each.at / seconds) == hour])
            for hour in range(24)
        ],
        "failed": sum(each.ttft == math.inf for each in answers),
        "GPU seconds": round(sum(used)),
        "TTFT p95": round(sorted(each.ttft for each in answers)[int(0.95 * len(answers))], 3),
        "TPOT p95": round(sorted(each.tpot for each in answers)[int(0.95 * len(answers))], 4),
        "ratios": ratios,
    }


async def main(args: argparse.Namespace, directory: Path) -> None:
    days = (
        day(config_of(layout, args.strategy, directory, args.files), layout, args.seconds, args.seed)
        for layout in args.layouts
    )
    for result in await asyncio.gather(*days):
        print(json.dumps({"files": args.files} | result), flush=True)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layouts", nargs="+", help="2P3D, 5agg, auto5")
    parser.add_argument("--strategy", default="decode_first")
    parser.add_argument("--files", default="one", choices=("one", "role", "flex"), help="engine configs")
    parser.add_argument("--seconds", type=float, default=480.0, help="length of the day")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(words)


if __name__ == "__main__":
    with scratch_directory("day-") as scratch:
        asyncio.run(main(parsed(), scratch.path))
