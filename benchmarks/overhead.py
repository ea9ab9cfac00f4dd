"""Measures what each order costs with an engine that takes no time: `python -m benchmarks.overhead [--quick]`.

Runs real frontends and workers on the recording engine, one deployment per order. All alternate in short rounds, so a
slow minute affects all. In `router`, Dynamo's frontend chains the stages. --upstream adds Dynamo's own worker on the
same engine, as agg and in that chain. --calls counts function calls in this process instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil

from benchmarks.calls import count_calls
from benchmarks.http_client import BadAnswerError, Client, completion_request
from benchmarks.models import weightless_model
from benchmarks.report import (
    TOO_SHORT,
    Column,
    Figure,
    Grid,
    Rounds,
    Say,
    Section,
    add_choice,
    add_number,
    add_numbers,
    add_output_arguments,
    end_program,
    rotated,
    run_benchmark,
)
from benchmarks.upstream_worker import UPSTREAM_COMMAND, require_upstream
from trtllm_disagg.common.cli import Parser
from trtllm_disagg.common.exits import ExitCode
from trtllm_disagg.common.machine import Needs, check_limits
from trtllm_disagg.strategies import STRATEGIES, orders, spec_of
from trtllm_disagg.tools.flag_types import not_negative, positive_up_to
from trtllm_disagg.tools.up.lifecycle import Deployment, running_deployment
from trtllm_disagg.tools.up.plan import DeploymentConfig
from trtllm_disagg.tools.up.run_dir import scratch_directory
from trtllm_disagg.tools.up.workers import needs_of

T = TypeVar("T")
BASELINE = "router"
_RUN_BY_WORKERS = [order.name for order in orders()]
_MODEL = "recording"
_PROMPT_TOKENS = 32
#: Suffix of the name of a role's CPU time, in microseconds.
_CPU = " worker CPU per token"
#: Steadier than either time, since a slow machine slows both.
_BESIDE_FRONTEND = "workers' CPU by the frontend's"
_ALL_CPU = "workers' CPU per token"
_TICK_SECONDS = 0.01
#: Share of traced requests: a key of _SAMPLERS, which has the variables that a worker needs for it.
_NONE = "none"
#: Prefix of the names of deployments of Dynamo's own worker.
UPSTREAM = "dynamo.trtllm "
#: Dynamo's prefill worker waits 30 s before it exits, even if idle.
_UPSTREAM_STOP_SECONDS = 5.0
_SAMPLERS = {
    _NONE: "OTEL_TRACES_SAMPLER=always_off",
    "1%": "OTEL_TRACES_SAMPLE_RATIO=0.01",
    "up": "",
    "every": "OTEL_TRACES_SAMPLER=always_on",
}
_COLUMNS = (
    Column("ttft", "ms", ".2f", "TTFT\nms"),
    Column("itl", "ms", ".3f", "ITL\nms"),
    Column("throughput", "tok/s", ".0f", "tok/s"),
    Column("ttft_together", "ms", ".1f", "TTFT ms,\nmany"),
    Column("chunks", "chunks/token", ".2f", "chunks\n/token"),
    Column("CPU", header="CPU\nus/token"),
)

#: Targets are for answers of this number of tokens.
_TOKENS = 128


def add_arguments(parser: Parser) -> None:
    add_output_arguments(parser)
    add_choice(parser, "--strategy", STRATEGIES, "orders to compare")
    parser.add_argument(
        "--traced",
        choices=_SAMPLERS,
        nargs="+",
        default=[_NONE],
        help="share of traced requests; up: as `trtllm-disagg up` has it. Runs each order with each of these "
        "(default: none, as the launch scripts have it)",
    )
    parser.add_argument(
        "--upstream",
        action="store_true",
        help="also measure Dynamo's own worker, dynamo.trtllm, on the same engine: agg and a pair",
    )
    add_number(parser, "--rounds", 24, "rounds; each measures all orders", type=positive_up_to(10_000))
    add_number(
        parser,
        "--concurrency",
        32,
        "concurrent requests in the second half of a round",
        type=positive_up_to(4096),
    )
    add_numbers(parser, "--tokens", _TOKENS, "tokens per answer there; shorter answers mean more requests")
    add_numbers(parser, "--prompt-tokens", _PROMPT_TOKENS, "tokens per prompt")
    add_number(parser, "--tokens-per-step", 1, "tokens that the engine has ready together")
    add_number(parser, "--step-ms", 0.0, "time between two steps; 0: none", type=not_negative, metavar="X")
    parser.add_argument(
        "--calls", action="store_true", help="count function calls per request instead of times"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two small rounds: shows that all works, measures little"
    )


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one round: `alone` one after another, then `together` over `concurrency` connections."""

    alone: int = 20
    alone_tokens: int = 32
    together: int = 96
    together_tokens: int = _TOKENS
    concurrency: int = 32
    prompt_tokens: int = _PROMPT_TOKENS

    @classmethod
    def of(cls, tokens: int, concurrency: int, prompt_tokens: int = _PROMPT_TOKENS) -> Load:
        """A load with at least the default's number of requests and of tokens in all."""
        together = max(cls().together, cls().together * cls().together_tokens // tokens)
        return cls(
            together=together,
            together_tokens=tokens,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
        )

    def __str__(self) -> str:
        return f"prompts of {self.prompt_tokens} tokens, answers of {self.together_tokens}"


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Measure and report. Exit status 0, also if targets are missed. An interrupt reports the complete rounds.

    Raises BadAnswerError if an answer is incomplete or differs between orders, and ConfigError if --upstream cannot run
    here.
    """
    parser = Parser(prog="python -m benchmarks.overhead", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    args = parser.parse_args(arguments)
    if args.upstream:
        require_upstream()
    if args.calls:
        count = partial(count_calls, args.strategy, with_upstream=args.upstream)
        run_benchmark("overhead", args, lambda say: asyncio.run(count(say)), lambda section: [section])
        return ExitCode.DONE
    measured: dict[Load, Rounds] = {}
    interrupts: list[KeyboardInterrupt] = []

    def measure(say: Say) -> None:
        try:
            asyncio.run(_measure(args, say, measured))
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)

    def report(_: None) -> list[Section]:
        of = "{}: " if len(measured) > 1 else ""
        return [
            section_of(
                rounds, _not_judged_because(load, quick=args.quick or bool(interrupts)), of.format(load)
            )
            for load, rounds in measured.items()
        ]

    run_benchmark("overhead", args, measure, report)
    if interrupts:
        raise interrupts[0]
    return ExitCode.DONE


async def _measure(args: argparse.Namespace, say: Say, measured: dict[Load, Rounds]) -> None:
    """Measure; add each complete round to `measured`."""
    loads = [Load.of(t, args.concurrency, p) for p, t in product(args.prompt_tokens, args.tokens)]
    rounds = args.rounds
    if args.quick:
        loads, rounds = [Load(4, 8, 8, 16, 4)], 2
    with scratch_directory("trtllm-disagg-overhead-") as scratch:
        configs = dict(_configs(args, scratch.path))
        for shortage in check_limits(sum(map(needs_of, configs.values()), Needs())):
            say(f"warning: {shortage}")
        say(f"starting {', '.join(configs)}")
        starting = (started(name, config) for name, config in configs.items())
        async with _together(starting) as subjects:
            for subject in subjects:
                say(f"{subject.name}: warming up")
                await subject.measure(loads[0])
            texts: set[tuple[Load, str]] = set()
            for number, load in product(range(rounds), loads):
                say(f"round {number + 1} of {rounds}: {load}")
                of_round = {each.name: await each.measure(load) for each in rotated(subjects, number)}
                for subject in subjects:
                    text, quantities = of_round[subject.name]
                    texts.add((load, text))
                    measured.setdefault(load, Rounds()).note(subject.name, quantities)
            if len(texts) != len(loads):
                raise BadAnswerError(f"{len(loads)} prompts got {len(texts)} different answers")
            say("stopping")


@asynccontextmanager
async def _together(managers: Iterable[AbstractAsyncContextManager[T]]) -> AsyncIterator[list[T]]:
    """Start all concurrently, and stop all concurrently: each takes a worker seconds."""
    stacks = [(AsyncExitStack(), manager) for manager in managers]
    try:
        starts = [stack.enter_async_context(manager) for stack, manager in stacks]
        started = await asyncio.gather(*starts, return_exceptions=True)
        for failure in started:
            if isinstance(failure, BaseException):
                raise failure
        yield [each for each in started if not isinstance(each, BaseException)]
    finally:
        await asyncio.gather(*(stack.aclose() for stack, _ in stacks))


def _configs(args: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, DeploymentConfig]]:
    """Yield (name of the subject, its deployment)."""
    for strategy, traced in product(args.strategy, args.traced):
        name = subject_name(strategy, traced, args.traced)
        sampler = ("env", _SAMPLERS[traced]) if _SAMPLERS[traced] else ()
        config = config_of(name, strategy, scratch, args)
        yield name, replace(config, worker_command=(*sampler, *config.worker_command))
    if args.upstream:
        for strategy in dict.fromkeys(map(_as_upstream_has_it, args.strategy)):
            name = UPSTREAM + strategy
            config = config_of(name, strategy, scratch, args)
            yield name, replace(config, worker_command=UPSTREAM_COMMAND, stop_timeout=_UPSTREAM_STOP_SECONDS)


def subject_name(strategy: str, traced: str, beside: Collection[str]) -> str:
    return strategy if len(beside) == 1 else f"{strategy}, {traced} traced"


def _strategy_of(subject: str) -> str:
    return subject.partition(",")[0]


def _as_upstream_has_it(strategy: str) -> str:
    """The order of Dynamo's own workers: its frontend calls prefill and decode."""
    return BASELINE if spec_of(strategy).is_disaggregated else strategy


def config_of(name: str, strategy: str, scratch: Path, args: argparse.Namespace) -> DeploymentConfig:
    place = scratch / re.sub(r"\W+", "-", name)
    pace = {"tokens_per_step": args.tokens_per_step, "step_seconds": args.step_ms / 1000}
    # Dynamo's own worker sets no transceiver.
    engine_args = {"recording": pace, "cache_transceiver_config": {"backend": "DEFAULT"}}
    return DeploymentConfig(
        strategy=strategy,
        model=str(weightless_model(place / "model")),
        served_model_name=_MODEL,
        run_dir=place / "run",
        http_port=0,
        engine="recording",
        worker_args=("--override-engine-args", json.dumps(engine_args)),
    )


@asynccontextmanager
async def started(name: str, config: DeploymentConfig) -> AsyncIterator[Subject]:
    async with running_deployment(config) as deployment, Client.to(deployment.base_url) as client:
        yield Subject(name, deployment, client)


class Subject:
    """A running deployment and the client's connections to it."""

    def __init__(self, name: str, deployment: Deployment, client: Client) -> None:
        self.name = name
        self._workers = {p.role: p.pid for p in deployment.processes if p.role != "frontend"}
        (self._frontend,) = (p.pid for p in deployment.processes if p.role == "frontend")
        self._client = client

    async def measure(self, asked: Load) -> tuple[str, dict[str, float]]:
        """Measure one round. Returns the text of the long answers, and the quantities of _COLUMNS and _CPU."""
        prompt = [16 + place % 64 for place in range(asked.prompt_tokens)]
        short = completion_request(_MODEL, prompt, asked.alone_tokens)
        alone = await self._client.ask_all([short] * asked.alone)
        long = completion_request(_MODEL, prompt, asked.together_tokens)
        before, of_frontend = self._cpu(), cpu_seconds(self._frontend)
        together = await self._client.ask_all([long] * asked.together, asked.concurrency)
        after, of_frontend = self._cpu(), cpu_seconds(self._frontend) - of_frontend
        texts = {answer.text() for answer in together}
        num_tokens = asked.together * asked.together_tokens
        if {len(text) for text in texts} != {asked.together_tokens}:
            raise BadAnswerError(f"{self.name}: answers of {sorted(map(len, texts))} tokens")
        (text,) = texts
        wall = max(a.ended for a in together) - min(a.asked for a in together)
        return text, {
            "ttft": median(1000 * (a.first - a.asked) for a in alone),
            "itl": median(1000 * (a.ended - a.first) / (asked.alone_tokens - 1) for a in alone),
            "throughput": num_tokens / wall,
            "ttft_together": median(1000 * (a.first - a.asked) for a in together),
            "chunks": median(len(a.events()) for a in together) / asked.together_tokens,
            **cpu_quantities({role: after[role] - before[role] for role in before}, of_frontend, num_tokens),
        }

    def _cpu(self) -> dict[str, float]:
        return {role: cpu_seconds(pid) for role, pid in self._workers.items()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def cpu_quantities(of_workers: Mapping[str, float], of_frontend: float, num_tokens: int) -> dict[str, float]:
    """`of_workers`: role -> CPU seconds. Counts 0 as one clock tick, since ratios need a number."""
    roles = {role: seconds or _TICK_SECONDS for role, seconds in of_workers.items()}
    return {
        _BESIDE_FRONTEND: sum(roles.values()) / (of_frontend or _TICK_SECONDS),
        _ALL_CPU: 1e6 * sum(roles.values()) / num_tokens,
        **{role + _CPU: 1e6 * seconds / num_tokens for role, seconds in roles.items()},
    }


def _not_judged_because(load: Load, *, quick: bool) -> str:
    if quick:
        return TOO_SHORT
    return "" if load.together_tokens == _TOKENS else f"targets are for answers of {_TOKENS} tokens"


def section_of(measured: Rounds, not_judged_because: str = "", of: str = "") -> Section:
    """A table for 80 columns, and figures. `of`: prefix of each figure's name, the load if there are several."""
    grid = Grid(
        f"{of}an engine that takes no time (no real tokens), medians over rounds",
        ("order",),
        _COLUMNS,
        {(strategy,): _cells(measured.medians(strategy)) for strategy in measured.subjects},
        of + "{0} {column}",
    )
    cpu = [
        Figure(name, median, "us", "<= 30" if name == f"prefill_first prefill{_CPU}" else "")
        for strategy in measured.subjects
        for quantity, median in measured.medians(strategy).items()
        if (name := f"{strategy} {quantity}").endswith(_CPU)
    ]
    beside = [
        figure
        for against in (_against_baseline, _against_untraced, _against_upstream)
        for subject in measured.subjects
        for figure in against(measured, subject)
    ]
    figures = [replace(each, figure=of + each.figure) for each in cpu + beside]
    title = f"Workers, and orders beside {BASELINE}"
    return Section(title, [grid], figures=figures, not_judged_because=not_judged_because)


def _cells(medians: dict[str, float]) -> dict[str, float | str]:
    """Put the CPU times of all roles into one cell: a column each would be too wide."""
    roles = [f"{name.removesuffix(_CPU)} {us:.0f}" for name, us in medians.items() if name.endswith(_CPU)]
    return medians | {"CPU": "\n".join(roles)}


def _against_baseline(measured: Rounds, subject: str) -> Iterator[Figure]:
    if subject not in _RUN_BY_WORKERS or BASELINE not in measured.subjects:
        return
    pairs = zip(measured.values[subject]["ttft"], measured.values[BASELINE]["ttft"], strict=True)
    added = median(own - other for own, other in pairs)
    yield Figure(f"{subject} TTFT - {BASELINE}", added, "ms", "<= 1")
    yield _ratio(f"{subject} tok/s / {BASELINE}", measured, "throughput", subject, BASELINE, ">= 0.9")


def _against_untraced(measured: Rounds, subject: str) -> Iterator[Figure]:
    """The cost of traces: in throughput, and in the workers' CPU, which is steadier."""
    untraced = f"{_strategy_of(subject)}, {_NONE} traced"
    if untraced == subject or untraced not in measured.subjects:
        return
    target = ">= 0.98" if subject.endswith(", 1% traced") else ""
    yield _ratio(f"{subject}: tok/s / {_NONE}", measured, "throughput", subject, untraced, target)
    for quantity in measured.values[subject]:
        if quantity.endswith((_CPU, _BESIDE_FRONTEND)):
            yield _ratio(f"{subject}: {quantity} / {_NONE}", measured, quantity, subject, untraced)


def _against_upstream(measured: Rounds, subject: str) -> Iterator[Figure]:
    """This project's worker / Dynamo's: below 1x it takes less time or CPU."""
    if subject.startswith(UPSTREAM):
        return
    other = UPSTREAM + _as_upstream_has_it(_strategy_of(subject))
    if other not in measured.subjects:
        return
    quantities = {"throughput": "tok/s", "ttft": "TTFT", "ttft_together": "TTFT, many", _ALL_CPU: _ALL_CPU}
    for quantity, said in quantities.items():
        yield _ratio(f"{subject}: {said} / {other}", measured, quantity, subject, other)


def _ratio(name: str, measured: Rounds, quantity: str, subject: str, other: str, target: str = "") -> Figure:
    return Figure(name, measured.ratio(quantity, subject, other), "x", target)


if __name__ == "__main__":
    end_program(main)
