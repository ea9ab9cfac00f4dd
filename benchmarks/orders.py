"""Compares `plan`'s simulation of a layout with the real thing: the same requests, at the same modelled times, sent to
modelled engines behind Dynamo's frontend.

    pip install -e '.[modelled]'
    python -m benchmarks.orders --model .cache/demo-model --layouts '2P2D prefill_first,2P2D auto' --rates 8,16,24

A conversation's next prompt contains the answer. The client knows its tokens in advance: the modelled engine's tokens
are a checksum. A larger `--time-scale` makes the times of frontend, handlers and client count less.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.http_client import Client, completion_request
from benchmarks.report import end_program
from trtllm_disagg.common.cli import Parser
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.config.deciders import ALWAYS
from trtllm_disagg.engines.recording.result import scripted_token
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import run_by_workers, spec_of
from trtllm_disagg.tools.plan import add_layout_arguments
from trtllm_disagg.tools.plan.fleet import simulate
from trtllm_disagg.tools.plan.layouts import Layout, layouts_of
from trtllm_disagg.tools.plan.modelled_gpus import Engines
from trtllm_disagg.tools.plan.simulation import ModelledWorker, SimulatedPoint
from trtllm_disagg.tools.plan.slo import Quantity, Slo, slo_of
from trtllm_disagg.tools.plan.workloads import Ask, Traffic, chosen_workloads, rates_of
from trtllm_disagg.tools.up.lifecycle import running_deployment
from trtllm_disagg.tools.up.plan import DeploymentConfig, ProcessRole

#: Token ids of text in the demo model's vocabulary.
_TOKENS = range(300, 2900)
_LONGEST_WAIT = "3600"
#: Flags of first stages, which pick by cached prefixes. Like TensorRT-LLM and `plan`, they pull no KV back.
_OF_CALLERS = ("--next-router", "kv", "--pull-min-tokens", "0", "--prefill-timeout", _LONGEST_WAIT)
_SIMULATIONS = 12
_HEADER = "rate of TTFT ms, TPOT ms (medians), in time, by one worker, KV tokens moved a request"


def chosen_layouts(layouts: Sequence[Layout], patterns: Sequence[str]) -> tuple[Layout, ...]:
    """The layouts with a name that matches a pattern. Raises ConfigError for a pattern without a match."""
    names = [layout.name for layout in layouts]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError.bad_value("--layouts", pattern, f"a pattern for some of: {', '.join(names)}")
    return tuple(each for each in layouts if any(fnmatch.fnmatchcase(each.name, one) for one in patterns))


def prompts_of(asks: Sequence[Ask], seed: str) -> Iterator[list[int]]:
    """Prompts made of these parts. Appends each answer to its last part, for the conversation's next turn."""
    known: dict[Any, list[int]] = {}
    for ask in asks:
        prompt: list[int] = []
        for name, tokens in ask.parts:
            part = known.setdefault(name, [])
            numbers = random.Random(f"{seed} {name} {len(part)}")
            part += numbers.choices(_TOKENS, k=max(0, tokens - len(part)))
            prompt += part[:tokens]
        own = random.Random(f"{seed} {ask.arrival}").choices(_TOKENS, k=ask.prompt_tokens - len(prompt))
        yield prompt + own
        if ask.parts and not own:
            part += (scripted_token(prompt, place) for place in range(ask.output_tokens))


async def measured(
    url: str, name: str, asks: Sequence[Ask], prompts: Sequence[list[int]], scale: float
) -> tuple[SimulatedPoint, list[dict[str, Any]]]:
    """The client's measurements, by the modelled clock, and each answer's `engine_data`."""
    async with Client.to(url) as client:
        begin = asyncio.get_running_loop().time() + 1.0

        async def ask_at_its_time(ask: Ask, prompt: list[int]) -> tuple[float, float, dict[str, Any]]:
            body = completion_request(name, prompt, ask.output_tokens)
            body |= {"ignore_eos": True, "nvext": {"extra_fields": ["engine_data"]}}
            await asyncio.sleep(begin + ask.arrival * scale - asyncio.get_running_loop().time())
            answer = await client.ask(body, float(_LONGEST_WAIT))
            disagg: dict[str, Any] = {}
            for event in answer.events():
                data = (event.get("nvext") or {}).get("engine_data") or {}
                disagg |= data.get("disagg") or {}
            return (answer.first - answer.asked) / scale, (answer.ended - answer.asked) / scale, disagg

        served = await asyncio.gather(*map(ask_at_its_time, asks, prompts))
    times: dict[Quantity, list[float]] = {
        "ttft": [first for first, _, _ in served],
        "latency": [end for _, end, _ in served],
        "tpot": [
            (end - first) / max(1, ask.output_tokens - 1)
            for ask, (first, end, _) in zip(asks, served, strict=True)
        ],
    }
    return SimulatedPoint([ask.arrival for ask in asks], times), [data for _, _, data in served]


def deployment(layout: Layout, engines: Engines, scale: float, run_dir: Path) -> DeploymentConfig:
    configs: dict[ProcessRole, Path] = {}
    for role in spec_of(layout.strategy).roles:
        given = dict(engines.arguments[role])
        given["modelled"] = given["modelled"] | {"time_scale": scale}
        given["stream_interval"] = 16
        if role != "agg":
            lease = {"kv_transfer_timeout_ms": 1000 * int(_LONGEST_WAIT)}
            given["cache_transceiver_config"] = given["cache_transceiver_config"] | lease
        configs[role] = run_dir / f"{role}.yaml"
        configs[role].write_text(yaml.safe_dump(given))
    return DeploymentConfig(
        strategy=layout.strategy,
        model=str(engines.model),
        served_model_name="modelled",
        run_dir=run_dir,
        agg_workers=max(1, layout.agg_workers),
        prefill_workers=max(1, layout.prefill_workers),
        decode_workers=max(1, layout.decode_workers),
        http_port=0,
        engine="modelled",
        engine_configs=configs,
        drain_seconds=1.0,
        worker_args=("--max-queued-requests", "0", "--max-queued-tokens", "0", *flags_of(layout)),
    )


def flags_of(layout: Layout) -> tuple[str, ...]:
    """Flags with which workers call each other as in the simulation."""
    chosen = () if layout.decider == ALWAYS else ("--prefill-decider", layout.decider)
    return (*_OF_CALLERS, *chosen) if layout.strategy in run_by_workers() else ()


def nearly(asks: Sequence[Ask], seed: int) -> list[Ask]:
    """The same requests, each up to 2 ms earlier or later as in a deployment, since that changes routers' choices."""
    numbers = random.Random(seed)
    moved = (replace(ask, arrival=max(0.0, ask.arrival + numbers.uniform(-2e-3, 2e-3))) for ask in asks)
    return sorted(moved, key=lambda ask: ask.arrival)


def figures(point: SimulatedPoint, slo: Slo) -> tuple[float, ...]:
    ttft, tpot = (1000 * median(point.times[name]) for name in ("ttft", "tpot"))
    return ttft, tpot, point.goodput_share(slo), point.by_one_worker, point.moved


def row(rate: float, source: str, of_points: Sequence[tuple[float, ...]]) -> str:
    """One row of means; with several points also the range of TTFT."""
    ttft, tpot, in_time, alone, moved = map(mean, zip(*of_points, strict=True))
    ttfts = [each[0] for each in of_points]
    spread = f" ({min(ttfts):.1f} to {max(ttfts):.1f})" if len(ttfts) > 1 else ""
    return f"{rate:6g} {source:9} {ttft:7.1f} {tpot:7.2f} {in_time:6.2f} {alone:6.2f} {moved:6.0f}{spread}"


async def compare(args: argparse.Namespace) -> None:
    layouts = chosen_layouts(layouts_of(args.workers), args.layouts.split(","))
    engines = Engines.read(args.model, args.engine_configs, layouts, args.override_engine_args)
    gpus, slo = engines.workers(), slo_of(args.slo)
    workloads = chosen_workloads(args, engines.longest).values()
    for layout in layouts:
        with TemporaryDirectory(prefix="trtllm-disagg-orders-") as scratch:
            config = deployment(layout, engines, args.time_scale, Path(scratch))
            async with running_deployment(config) as running:
                for traffic in workloads:
                    print(f"{layout.name}, {traffic.description}\n{_HEADER}", flush=True)
                    for rate in rates_of(args.rates):
                        await _compare_at(rate, layout, traffic, gpus, slo, running.base_url, args)


async def _compare_at(
    rate: float,
    layout: Layout,
    traffic: Traffic,
    gpus: Mapping[str, ModelledWorker],
    slo: Slo,
    url: str,
    args: argparse.Namespace,
) -> None:
    asks = traffic.asks(rate, args.requests)
    # Each rate has its own parts, so nothing is cached.
    prompts = list(prompts_of(asks, f"{traffic.name} {rate:g}"))
    real, answers = await measured(url, "modelled", asks, prompts, args.time_scale)
    kv_bytes = gpus[spec_of(layout.strategy).roles[0]].gpus.facts.kv_bytes_per_token
    real = replace(
        real,
        by_one_worker=mean(data.get("strategy") in ("local", "agg") for data in answers),
        moved=mean(data.get("kv_transfer_bytes", 0) for data in answers) / kv_bytes,
    )
    simulated = [simulate(layout, gpus, nearly(asks, seed)) for seed in range(_SIMULATIONS)]
    print(row(rate, "measured", [figures(real, slo)]))
    print(row(rate, "simulated", [figures(each, slo) for each in simulated]), flush=True)
    if args.out:
        with args.out.open("a") as out:
            out.write(json.dumps({"layout": layout.name, "rate": rate, "measured": asdict(real)}) + "\n")


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    parser = Parser(
        prog="python -m benchmarks.orders",
        description=f"{__doc__}\nDefaults: --workloads agentic --rates 8,16,24 --slo ttft=60,tpot=14.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_layout_arguments(parser, "directory with a tokenizer and a config.json")
    parser.set_defaults(workloads="agentic", rates="8,16,24", slo="ttft=60,tpot=14")
    add = parser.add_argument
    add("--workers", type=int, default=4, help="workers per layout, of all roles (default: %(default)s)")
    layouts = "4 agg,2P2D prefill_first,2P2D decode_first length,2P2D auto"
    add("--layouts", default=layouts, metavar="PATTERN,...", help="(default: %(default)s)")
    add("--requests", type=int, default=150, metavar="N", help="requests per rate (default: %(default)s)")
    text = "slow the modelled clock down by this factor (default: %(default)g)"
    add("--time-scale", type=float, default=12.0, metavar="K", help=text)
    add("--out", type=Path, metavar="FILE", help="append a line of JSON for each measured rate")
    add("--quick", action="store_true", help="two layouts, one rate, 12 requests: shows that all works")
    args = parser.parse_args(arguments)
    if args.quick:
        args.workers, args.layouts, args.rates = 2, "2 agg,1P1D decode_first", "4"
        args.requests, args.time_scale = 12, 4.0
    asyncio.run(compare(args))
    return ExitCode.DONE


if __name__ == "__main__":
    end_program(main)
