"""Measures the cost of many instances: for a worker with that number of peers, and for a client like a frontend.

python -m benchmarks.scale selection        CPU of one request's selection, in this process, with fakes
python -m benchmarks.scale discovery        time and memory of instances in file discovery, in one process
python -m benchmarks.scale fleet --instances 100 --events 20
                                            workers behind Dynamo's frontend, with etcd and NATS: CPU and memory
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from tests.support.handling import request
from tests.support.stage_client import Described
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.selection import InFlight, LeastLoaded, RoundRobin, Selection, Selector

COUNTS = (10, 100, 1000)
ROUNDS = 200


async def selection() -> None:
    for count in COUNTS:
        load = InFlight()
        selectors: dict[str, Selector] = {"round_robin": RoundRobin(), "least_loaded": LeastLoaded(load)}
        for name, selector in selectors.items():
            stage = Selection(Described(count), selector, "decode")
            peers = Peers(stage, CircuitBreaker(3, 5.0), {}, load)
            await peers.learn()
            asked = request()
            began = time.process_time()
            for _ in range(ROUNDS):
                await peers.learn()
                peers.check(asked)
                peers.num_healthy(), peers.depth(), peers.facts()
                await peers.pick(asked)
            micros = (time.process_time() - began) / ROUNDS * 1e6
            print(f"{count:5} peers, {name:12}: {micros:7.0f} µs of CPU a request", flush=True)


async def discovery(count: int) -> None:
    """Time until one client sees `count` endpoints, each with its own runtime like a worker's."""
    from dynamo.runtime import DistributedRuntime

    async def answer(asked: Any) -> Any:
        yield asked

    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DYN_FILE_KV"] = directory
        watching = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
        client = await watching.endpoint("scale.backend.generate").client()
        runtimes, served, began = [watching], [], time.monotonic()
        for _ in range(count):
            runtimes.append(DistributedRuntime(loop, "file", "tcp", event_plane="zmq"))
            endpoint = runtimes[-1].endpoint("scale.backend.generate")
            served.append(asyncio.ensure_future(endpoint.serve_endpoint(answer)))
        while len(client.instance_ids()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        before = time.process_time()
        await asyncio.sleep(10)
        idle = (time.process_time() - before) / 10
        print(
            f"{count} instances: all seen after {seconds:.1f} s, {rss:.0f} MiB, {idle:.2%} of a core when idle"
        )
        for runtime in runtimes:
            runtime.shutdown()
        await asyncio.gather(*served, return_exceptions=True)


# -- a fleet behind a frontend


MODEL = Path(__file__).parents[1] / ".cache" / "demo-model"
WORKERS_A_PROCESS, BLOCK, SECONDS, REQUESTS = 20, 32, 20.0, 400


def serve(count: int, events: float) -> None:
    """Run `count` workers in this process, half of each role, on recording engines. Each publishes `events` made-up
    blocks of 32 tokens per second as stored, then as removed. Never returns.
    """
    from trtllm_disagg.config.args import add_worker_arguments
    from trtllm_disagg.worker.worker import run_worker
    from trtllm_disagg.worker.worker_command import read_settings

    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    add_worker_arguments(parser)
    llms: list[Any] = []

    async def worker(role: str) -> None:
        order = ["--disaggregation-mode", role, "--disaggregation-strategy", "decode_first"]
        arguments = [
            "--model",
            str(MODEL),
            "--engine",
            "recording",
            "--served-model-name",
            MODEL.name,
            *order,
        ]
        config, engine_args, api = read_settings(
            parser.parse_args([*arguments, *(["--publish-events-and-metrics"] if events else [])])
        )

        def llm(**given: Any) -> Any:
            llms.append(api.llm(**given))
            return llms[-1]

        await run_worker(config, engine_args, replace(api, llm=llm))

    async def all_workers() -> None:
        together = [worker(("prefill", "decode")[number % 2]) for number in range(count)]
        await asyncio.gather(*together, *([publish_blocks(llms, events)] if events else []))

    asyncio.run(all_workers())


async def publish_blocks(llms: list[Any], per_second: float) -> None:
    dice, ids = random.Random(os.getpid()), itertools.count(1)
    while True:
        await asyncio.sleep(1 / per_second)
        for llm in llms:
            tokens = [{"token_id": dice.randrange(10, 400), "token_extra_id": 0} for _ in range(BLOCK)]
            block = {"block_hash": next(ids), "tokens": tokens, "cache_level": 0, "priority": 35}
            llm.kv_cache_events += [
                {"data": {"type": "stored", "parent_hash": None, "blocks": [block]}},
                {"data": {"type": "removed", "block_hashes": [block["block_hash"]]}},
            ]


@contextmanager
def fleet(count: int, events: float, directory: Path) -> Iterator[dict[str, list[psutil.Popen]]]:
    """Start the processes. Yields them by group; the file `directory`/port will have the frontend's port."""
    from trtllm_disagg.tools.up.ports import free_http_port

    host = "127.0.0.1"
    client, peer, nats, http = (free_http_port(host, 0) for _ in range(4))
    etcd = {"client": f"http://{host}:{client}", "peer": f"http://{host}:{peer}"}
    places = [f"--{verb}-{name}-urls={url}" for name, url in etcd.items() for verb in ("listen", "advertise")]
    places = [each.replace("--advertise-peer", "--initial-advertise-peer") for each in places]
    planes = {"DYN_DISCOVERY_BACKEND": "etcd", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "nats"}
    env = os.environ | planes | {"ETCD_ENDPOINTS": etcd["client"], "NATS_SERVER": f"nats://{host}:{nats}"}
    (directory / "port").write_text(str(http))
    cluster = f"--initial-cluster=default={etcd['peer']}"
    python = [sys.executable, "-m"]
    frontend = [*python, "dynamo.frontend", "--router-mode", "kv", "--http-port", str(http)]
    own = [*python, "benchmarks.scale", "serve", "--events", str(events), "--instances"]
    sizes = [min(WORKERS_A_PROCESS, count - i) for i in range(0, count, WORKERS_A_PROCESS)]
    with ExitStack() as stack:

        def start(name: str, argv: list[str]) -> psutil.Popen:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            process = psutil.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        brokers = [
            start(
                "etcd", [shutil.which("etcd") or "", "--data-dir", str(directory / "etcd"), *places, cluster]
            ),
            start(
                "nats",
                [
                    shutil.which("nats-server") or "",
                    "-a",
                    host,
                    "-p",
                    str(nats),
                    "-js",
                    "-sd",
                    str(directory),
                ],
            ),
        ]
        time.sleep(2)
        yield {
            "etcd and NATS": brokers,
            "frontend": [start("frontend", frontend)],
            "workers": [start(f"workers-{i}", [*own, str(size)]) for i, size in enumerate(sizes)],
        }


def use(processes: dict[str, list[psutil.Popen]]) -> dict[str, tuple[float, float]]:
    """Group of processes -> (CPU seconds since their start, MiB of memory now)."""
    return {
        group: (
            sum(sum(each.cpu_times()[:2]) for each in some),
            sum(each.memory_info().rss for each in some) / 2**20,
        )
        for group, some in processes.items()
    }


def ask(url: str, prompt: list[int]) -> None:
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        json.load(answer)


def measure_fleet(count: int, events: float) -> None:
    with tempfile.TemporaryDirectory(prefix="scale-") as name, fleet(count, events, Path(name)) as processes:
        began = time.monotonic()
        logs, url = Path(name), f"http://127.0.0.1:{(Path(name) / 'port').read_text()}/v1/completions"
        while sum(file.read_text().count("worker ready") for file in logs.glob("workers-*.log")) < count:
            if dead := [each for some in processes.values() for each in some if each.poll() is not None]:
                raise RuntimeError(f"{dead} ended; their logs: {logs}")
            time.sleep(0.5)
        dice, is_served = random.Random(count), False
        while not is_served:
            with suppress(OSError):
                ask(url, [10])
                is_served = True
        print(f"{count} workers, {events:g} blocks/s each: ready after {time.monotonic() - began:.0f} s")
        for _ in range(
            2 * count
        ):  # each worker asks its peers for their descriptions, with its first request
            ask(url, [dice.randrange(10, 400) for _ in range(4 * BLOCK)])
        before = use(processes)
        time.sleep(SECONDS)
        idle = use(processes)
        asking = time.monotonic()
        for _ in range(REQUESTS):
            ask(url, [dice.randrange(10, 400) for _ in range(4 * BLOCK)])
        seconds = time.monotonic() - asking
        after = use(processes)
        for group, (cpu, mib) in after.items():
            share = (idle[group][0] - before[group][0]) / SECONDS
            request_ms = (cpu - idle[group][0] - share * seconds) / REQUESTS * 1000
            print(f"  {group:14} idle {share:7.2%} of a core, {mib:6.0f} MiB, {request_ms:6.2f} ms/request")
        print(f"  {seconds / REQUESTS * 1000:.1f} ms per request, one at a time", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("selection", "discovery", "fleet", "serve"))
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument(
        "--events", type=float, default=0.0, help="blocks stored and removed per worker and second"
    )
    args = parser.parse_args()
    if args.what == "serve":
        serve(args.instances, args.events)
    elif args.what == "fleet":
        measure_fleet(args.instances, args.events)
    else:
        asyncio.run(selection() if args.what == "selection" else discovery(args.instances))


if __name__ == "__main__":
    main()
