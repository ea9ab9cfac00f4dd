"""Compares TTFT of turns 2 to 8 in prefill_first when prefill pulls an answer's KV back and when it computes that KV:
`python -m benchmarks.turns --answers 16 64 200 --conversations 7`.

Two deployments of the demo model on embedded engines behind Dynamo's frontends run side by side. Each conversation runs
on one, then on the other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path
from statistics import median

from benchmarks.http_client import Client, completion_request
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


async def first_tokens(client: Client, answer: int, seed: int) -> list[float]:
    """Milliseconds to the first token of each turn but the first."""
    dice, seconds = random.Random(seed), list[float]()
    prompt = [dice.randrange(10, 400) for _ in range(FIRST)]
    for _ in range(TURNS):
        more = {"ignore_eos": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
        got = await client.ask(completion_request(MODEL.name, prompt, answer) | more)
        seconds.append(got.first - got.asked)
        extra = (event.get("nvext") or {} for event in got.events())
        tokens = [token for each in extra for token in each.get("completion_token_ids") or ()]
        prompt = [*prompt, *tokens, *(dice.randrange(10, 400) for _ in range(NEW))]
    return [1000 * each for each in seconds[1:]]


async def main(args: argparse.Namespace, directory: Path) -> None:
    async with (
        running_deployment(config(directory, 1)) as pulls,
        running_deployment(config(directory, 0)) as computes,
        Client.to(pulls.base_url) as pulling,
        Client.to(computes.base_url) as computing,
    ):
        for answer in args.answers:
            pairs = []
            for seed in range(args.conversations):
                both = [await first_tokens(each, answer, seed) for each in (pulling, computing)]
                pairs.append([median(each) for each in both])
            pulled, computed = (median(each) for each in zip(*pairs[1:], strict=True))
            ratio = median(a / b for a, b in pairs[1:])
            print(
                f"{answer:4} tokens: {pulled:6.1f} ms pulled, {computed:6.1f} computed, {ratio:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, nargs="+", default=[16, 64, 200], help="tokens per answer")
    parser.add_argument("--conversations", type=int, default=7, help="number; the first one warms up")
    with scratch_directory("turns-") as scratch:
        asyncio.run(main(parser.parse_args(), scratch.path))
