"""What one more instance costs: a worker's request among many peers, and a frontend-like client of as many instances.

python -m benchmarks.scale selection        CPU of one request's selection, in this process, with fakes
python -m benchmarks.scale discovery        instances in file discovery, in one process: how long, how much memory
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from typing import Any

from tests.support.handling import request
from tests.support.stage_client import SayingInstance
from trtllm_disagg.handlers.circuit_breaker import CircuitBreaker
from trtllm_disagg.handlers.peers import Peers
from trtllm_disagg.handlers.select import InFlight, LeastLoaded, RoundRobin, Selection, Selector

COUNTS = (10, 100, 1000)
TURNS = 200


class Instances:
    """So many, which describe themselves."""

    def __init__(self, count: int) -> None:
        self._instances = {i: SayingInstance(i, {}) for i in range(1, count + 1)}

    def instance_ids(self) -> list[int]:
        return list(self._instances)

    def instance(self, instance_id: int) -> SayingInstance:
        return self._instances[instance_id]


async def selection() -> None:
    for count in COUNTS:
        load = InFlight()
        selectors: dict[str, Selector] = {"round_robin": RoundRobin(), "least_loaded": LeastLoaded(load)}
        for name, selector in selectors.items():
            stage = Selection(Instances(count), selector, "decode")
            peers = Peers(stage, CircuitBreaker(3, 5.0), {}, load)
            await peers.learn()
            asked = request()
            began = time.process_time()
            for _ in range(TURNS):
                await peers.learn()
                peers.check(asked)
                peers.num_healthy(), peers.depth(), peers.facts()
                await peers.pick(asked)
            micros = (time.process_time() - began) / TURNS * 1e6
            print(f"{count:5} peers, {name:12}: {micros:7.0f} µs of CPU a request", flush=True)


async def discovery(count: int) -> None:
    """Endpoints of one runtime each, as workers have, and one client that sees them come."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("selection", "discovery"))
    parser.add_argument("--instances", type=int, default=50)
    args = parser.parse_args()
    asyncio.run(selection() if args.what == "selection" else discovery(args.instances))


if __name__ == "__main__":
    main()
