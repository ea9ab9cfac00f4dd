"""A command in AIPerf's place: sends the requests of a sweep, and writes what AIPerf 0.13.0 writes of it.
`command_in` makes a file of it, for `--aiperf`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx


def command_in(directory: Path) -> Path:
    file = directory / "aiperf"
    root = Path(__file__).parents[2]
    file.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.support.fake_aiperf import main\nmain(sys.argv[1:])\n"
    )
    file.chmod(0o755)
    return file


def main(arguments: list[str]) -> None:
    given = dict(pairwise(arguments))
    rates = given["--request-rate"].split(",")
    for rate in rates:
        # One rate is no sweep.
        place = Path(given["--artifact-dir"]) / (f"rate_{float(rate)}" if len(rates) > 1 else "")
        place.mkdir(exist_ok=True)
        content = asyncio.run(_at_rate(given, float(rate)))
        (place / "profile_export_aiperf.json").write_text(json.dumps(content))


def _tokenizer(name: str) -> Path:
    """Of the cache of the Hugging Face hub."""
    cached = Path(os.environ["HF_HUB_CACHE"]) / f"models--{name.replace('/', '--')}"
    return cached / "snapshots" / (cached / "refs" / "main").read_text()


async def _at_rate(given: dict[str, str], rate: float) -> dict[str, Any]:
    numbers = random.Random(rate)
    vocabulary = json.loads((_tokenizer(given["--tokenizer"]) / "config.json").read_text())["vocab_size"]
    count = int(given["--request-count"])
    prompts = [[numbers.randrange(2, vocabulary) for _ in range(int(given["--isl"]))] for _ in range(count)]
    begun = time.monotonic()
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        times = await asyncio.gather(
            *(_send(client, given, prompt, i / rate) for i, prompt in enumerate(prompts))
        )
    firsts, gaps = zip(*times, strict=True)
    limits = dict(text.split(":") for text in given["--goodput"].split())
    good = [
        first <= float(limits["time_to_first_token"]) and gap <= float(limits["inter_token_latency"])
        for first, gap in times
    ]
    tokens = count * int(given["--osl"]) / (time.monotonic() - begun)
    return {
        "input_config": {"phases": [{"rate": rate}]},
        "good_request_fraction": {"avg": mean(good)},
        "request_error_rate": {"avg": 0.0},
        "request_throughput": {"avg": count / (time.monotonic() - begun)},
        "output_token_throughput": {"avg": tokens},
        "output_token_throughput_per_user": {"p50": 1000 / median(gaps)},
        "time_to_first_token": {"p50": median(firsts), "p99": max(firsts)},
        "inter_token_latency": {"p50": median(gaps), "p99": max(gaps)},
    }


async def _send(
    client: httpx.AsyncClient, given: dict[str, str], prompt: list[int], at: float
) -> tuple[float, float]:
    """Milliseconds until the first token, and between tokens."""
    await asyncio.sleep(at)
    body = {
        "model": given["--model"],
        "prompt": prompt,
        "max_tokens": int(given["--osl"]),
        "ignore_eos": True,
    }
    begun, moments = time.monotonic(), list[float]()
    async with client.stream(
        "POST", f"{given['--url']}/v1/completions", json=body | {"stream": True}
    ) as response:
        response.raise_for_status()
        async for text in response.aiter_lines():
            if text.startswith("data: ") and text != "data: [DONE]":
                moments.append(time.monotonic())
    return 1000 * (moments[0] - begun), 1000 * (moments[-1] - moments[0]) / max(1, int(given["--osl"]) - 1)
