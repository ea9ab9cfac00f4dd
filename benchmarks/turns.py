"""Time to the first token of turns 2 to 8 of conversations in prefill_first, with the KV of answers pulled back from
the decode worker and computed again: `python benchmarks/turns.py --answers 16 64 200 --conversations 7`.

Two deployments of the demo model on embedded engines behind Dynamo's frontends run side by side, one conversation at a
time, first on one and then on the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from trtllm_disagg.tools.up.lifecycle import running_deployment
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.run_dir import scratch_directory
from trtllm_disagg.tools.up.up_command import engine_configs_in

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".cache" / "demo-model"
TURNS, FIRST, NEW = 8, 200, 30


def config(directory: Path, min_tokens: int) -> DeploymentConfig:
    return DeploymentConfig(
        strategy="prefill_first",
        model=str(MODEL),
        served_model_name=MODEL.name,
        run_dir=directory / str(min_tokens),
        http_port=0,
        engine="embedded",
        engine_configs=engine_configs_in(ROOT / "engine_configs" / "demo", "prefill_first"),
        worker_args=("--pull-min-tokens", str(min_tokens)),
    )


async def first_tokens(http: aiohttp.ClientSession, url: str, answer: int, seed: int) -> list[float]:
    """In milliseconds, of each turn but the first."""
    dice, seconds = random.Random(seed), []
    prompt = [dice.randrange(10, 400) for _ in range(FIRST)]
    for _ in range(TURNS):
        body: dict[str, Any] = {"model": MODEL.name, "prompt": prompt, "max_tokens": answer, "stream": True}
        body |= {"ignore_eos": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
        asked, tokens = time.perf_counter(), list[int]()
        async with http.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if not tokens:
                        seconds.append(time.perf_counter() - asked)
                    tokens += (json.loads(line[6:]).get("nvext") or {}).get("completion_token_ids") or []
        prompt = [*prompt, *tokens, *(dice.randrange(10, 400) for _ in range(NEW))]
    return [1000 * each for each in seconds[1:]]


async def main(args: argparse.Namespace, directory: Path) -> None:
    async with (
        running_deployment(config(directory, 1)) as pulls,
        running_deployment(config(directory, 0)) as computes,
        aiohttp.ClientSession() as http,
    ):
        for answer in args.answers:
            pairs = []
            for seed in range(args.conversations):
                both = [await first_tokens(http, each.base_url, answer, seed) for each in (pulls, computes)]
                pairs.append([median(each) for each in both])
            pulled, computed = (median(each) for each in zip(*pairs[1:], strict=True))
            ratio = median(a / b for a, b in pairs[1:])
            print(
                f"{answer:4} tokens: {pulled:6.1f} ms pulled, {computed:6.1f} computed, {ratio:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, nargs="+", default=[16, 64, 200], help="tokens")
    parser.add_argument("--conversations", type=int, default=7, help="the first one warms up")
    with scratch_directory("turns-") as scratch:
        asyncio.run(main(parser.parse_args(), scratch.path))
