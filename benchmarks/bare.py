"""Measures the cost of Dynamo's runtime alone, per order: `python -m benchmarks.bare [--tokens 8] [--rounds 12]`.

Bare workers have no engine: they register, receive a request, call the peer and forward its answer. No worker on
Dynamo's request plane can be faster. They alternate with Dynamo's own worker and this project's, both on the recording
engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

from benchmarks.overhead import UPSTREAM, Load, config_of, started
from benchmarks.report import (
    Column,
    Grid,
    Rounds,
    Section,
    print_report,
    progress,
    rotated,
    wide_console,
)
from benchmarks.upstream_worker import UPSTREAM_COMMAND
from trtllm_disagg.tools.up.run_dir import scratch_directory

ORDERS = ("agg", "prefill_first", "decode_first", "router")
BARE, OURS = "bare ", ""
ROOT = Path(__file__).parents[1]
#: Role -> component name that frontends expect.
COMPONENTS = {"agg": "backend", "prefill": "prefill", "decode": "backend"}


class BareWorker:
    def __init__(self, role: str, order: str, namespace: str) -> None:
        self.role = role
        self._order = order
        self._namespace = namespace
        self._peer: Any = None

    @property
    def is_first_stage(self) -> bool:
        return self.role == "agg" or self._order == f"{self.role}_first"

    @property
    def registration(self) -> dict[str, Any]:
        if self._order != "router":
            return {"worker_type": WorkerType.Aggregated, "needs": []}
        own, other = WorkerType.Prefill, WorkerType.Decode
        if self.role == "decode":
            own, other = other, own
        return {"worker_type": own, "needs": [[other]]}

    def component(self, role: str) -> str:
        return f"{self._namespace}.{COMPONENTS[role]}.generate"

    async def connect(self, runtime: Any) -> None:
        if self.is_first_stage and self.role != "agg":
            other = "decode" if self.role == "prefill" else "prefill"
            self._peer = await runtime.endpoint(self.component(other)).client()
            await self._peer.wait_for_instances()

    def __call__(self, request: Any, context: Any, response_sender: Any = None) -> AsyncIterator[Any]:
        return self._answer(request, context, response_sender)

    async def _answer(self, request: Any, context: Any, sender: Any) -> AsyncIterator[Any]:
        """`sender`: Dynamo's cheaper path for chunks; None for health probes."""
        async for chunk in self._chunks(request, context):
            if sender is None:
                yield chunk
            else:
                sender.send(chunk)
        if sender is not None:
            sender.close()

    async def _chunks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        max_tokens = (request.get("stop_conditions") or {}).get("max_tokens") or 1
        prompt = len(request["token_ids"])
        tokens = [16 + place % 64 for place in range(max_tokens)]
        handoff = {"disaggregated_params": {"bare": 1}}
        answer = end({"token_ids": tokens}, prompt, max_tokens)
        if self.role == "agg":
            yield answer
        elif self.role == "prefill" and self._order == "prefill_first":
            yield {"token_ids": tokens[:1]}
            async for chunk in await self._call(request | {"prefill_result": handoff}, context):
                yield chunk
        elif self.role == "prefill":
            yield end({"token_ids": tokens[:1]} | handoff, prompt, 1)
        elif self._order == "decode_first":
            async for _ in await self._call(request, context):
                yield {"token_ids": tokens[:1]}
            yield end({"token_ids": tokens[1:]}, prompt, max_tokens)
        elif self._order == "router":
            yield answer
        else:
            yield end({"token_ids": tokens[1:]}, prompt, max_tokens)

    async def _call(self, request: Any, context: Any) -> Any:
        (first, *_) = self._peer.instance_ids()
        return await self._peer.direct(request, first, annotated=False, context=context)


def end(chunk: dict[str, Any], prompt: int, tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return chunk | {"finish_reason": "length", "completion_usage": usage}


async def serve(arguments: list[str]) -> None:
    """Run one bare worker. `arguments`: the flags that `up` passes to a worker."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--namespace", "--model", "--served-model-name"):
        parser.add_argument(flag)
    parser.add_argument("--disaggregation-mode", default="agg")
    parser.add_argument("--disaggregation-strategy", default="agg")
    args, _ = parser.parse_known_args(arguments)
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    worker = BareWorker(args.disaggregation_mode, args.disaggregation_strategy, args.namespace)
    endpoint = runtime.endpoint(worker.component(worker.role))
    await worker.connect(runtime)
    if worker.is_first_stage or args.disaggregation_strategy == "router":
        card = ModelRuntimeConfig()
        card.context_length = 4096
        served = ModelType.Chat | ModelType.Completions
        if args.disaggregation_strategy == "router" and worker.role == "prefill":
            served = ModelType.Prefill
        await register_model(
            ModelInput.Tokens,
            served,
            endpoint,
            args.model,
            args.served_model_name,
            runtime_config=card,
            kv_cache_block_size=32,
            ignore_weights=True,
            **worker.registration,
        )
    await endpoint.serve_endpoint(worker, graceful_shutdown=False)


async def measure(tokens: int, rounds: int) -> Rounds:
    measured, load = Rounds(), Load.of(tokens, 32)
    variables = ("DYN_SYSTEM_STARTING_HEALTH_STATUS=ready", f"PYTHONPATH={ROOT}")
    command = ("env", *variables, sys.executable, "-m", "benchmarks.bare", "worker")
    scratch_args = argparse.Namespace(tokens_per_step=1, step_ms=0.0)
    untraced = ("env", "OTEL_TRACES_SAMPLER=always_off")
    with progress("bare") as say, scratch_directory("trtllm-disagg-bare-") as scratch:
        say("starting")
        configs = {}
        for order in ORDERS:
            ours = config_of(order, order, scratch.path, scratch_args)
            configs[OURS + order] = replace(ours, worker_command=(*untraced, *ours.worker_command))
            bare = config_of(BARE + order, order, scratch.path, scratch_args)
            configs[BARE + order] = replace(bare, worker_command=command, stop_timeout=5.0)
        for order in ("agg", "router"):
            theirs = config_of(UPSTREAM + order, order, scratch.path, scratch_args)
            configs[UPSTREAM + order] = replace(theirs, worker_command=UPSTREAM_COMMAND, stop_timeout=5.0)
        async with AsyncExitStack() as stack:
            subjects = [await stack.enter_async_context(started(*each)) for each in configs.items()]
            for number in range(-1, rounds):  # the first round warms up
                say(f"round {number + 1} of {rounds}")
                for subject in rotated(subjects, max(0, number)):
                    _, quantities = await subject.measure(load)
                    if number >= 0:
                        measured.note(subject.name, quantities)
    return measured


def report(measured: Rounds, tokens: int) -> Section:
    rows = {}
    for order in ORDERS:
        theirs = UPSTREAM + ("agg" if order == "agg" else "router")
        rows[order,] = {
            name: measured.ratio("throughput", subject, other)
            for name, subject, other in (
                ("bare / theirs", BARE + order, theirs),
                ("ours / theirs", OURS + order, theirs),
                ("ours / bare", OURS + order, BARE + order),
            )
        } | {"bare": measured.medians(BARE + order)["throughput"]}
    columns = [Column("bare", "tok/s", ".0f")]
    columns += [Column(name, "x") for name in ("bare / theirs", "ours / theirs", "ours / bare")]
    title = f"Answers of {tokens} tokens, 32 at a time, tokens/s beside {UPSTREAM.strip()} (theirs)"
    return Section(title, [Grid(title, ("order",), columns, rows, "{0} {column}")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    measured = asyncio.run(measure(args.tokens, args.rounds))
    print_report(wide_console(), [report(measured, args.tokens)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        uvloop.run(serve(sys.argv[2:]))
    else:
        main()
