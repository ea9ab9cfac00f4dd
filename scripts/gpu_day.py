"""Checks on a node with GPUs, in about twenty minutes, what no GPU has shown yet.

    python -m scripts.gpu_day --model MODEL --engine-configs engine_configs/llama-3.1-8b --gpus 0,1,2 --decode-workers 2

Starts deployments by `trtllm-disagg up`, and Dynamo's own worker beside them, and asks them as a client. Each line is
PASS, FAIL or NOT RUN with what was seen; paste gpu-day.txt. Without a GPU: `--engine recording`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.gpu_site import (
    AGG,
    ANSWER_TOKENS,
    CLI,
    MACHINE,
    ORDERS,
    PAIR,
    RECORDING,
    ROUTER,
    SECONDS,
    TENSORRT_LLM,
    UPSTREAM,
    Answer,
    FailedError,
    NotRunError,
    RefusedError,
    Site,
    difference,
    require,
    serving,
)
from trtllm_disagg.engine.mpi_start import try_start
from trtllm_disagg.tools.up.run_dir import ProcessRecord

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
#: Relative to dynamo.trtllm: min tokens/s of agg, and max time to its first token.
LEAST_SPEED, MAX_TTFT = 0.9, 1.2
WORDS = (
    "the lease of a block ends when its reader has said done, or when the time of the prefill worker is over "
)
PROMPTS = tuple(
    f"Chapter {n}, in {n} sentences: {WORDS * repeats}" for n, repeats in enumerate((1, 2, 5, 20), 2)
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
IN_FLIGHT = (
    "dynamo_component_inflight_requests",
    "trtllm_disagg_requests_active",
    "trtllm_disagg_kv_blocks_used",
)


@dataclass
class Day:
    """Results that later checks need."""

    engine: str
    load_seconds: float
    #: agg's answers by prompt, and the prompts of a conversation.
    answers: dict[str, Answer] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    #: Server -> median TTFT in seconds, and tokens per second.
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def require_model(self) -> None:
        if self.engine == RECORDING:
            raise NotRunError("this engine has no model")


Run = Callable[[Site, Day], str]


def compared(answers: Mapping[str, Answer], day: Day) -> str:
    require(day.answers, "agg has given no answers to compare with")
    for answer in answers.values():
        require(answer.has_end, f"an answer has no end; it has {len(answer.tokens)} tokens")
    ties = [tie for prompt, answer in answers.items() if (tie := difference(answer, day.answers[prompt]))]
    return f"{len(answers) - len(ties)} of {len(answers)} equal" + "".join(ties)


def at_once(pool: ThreadPoolExecutor, site: Site, **more: Any) -> dict[str, Future[Answer]]:
    return {prompt: pool.submit(site.ask, prompt, **more) for prompt in PROMPTS}


def results(asked: Mapping[str, Future[Answer]]) -> dict[str, Answer]:
    return {prompt: answer.result() for prompt, answer in asked.items()}


def fresh(words: int = 100) -> str:
    """A prompt that is in no cache."""
    return f"{uuid.uuid4()} " + WORDS * (words // len(WORDS.split()))


def until(condition: Callable[[], object], seconds: float) -> float:
    """Returns the seconds until the condition holds. Raises FailedError."""
    began = time.monotonic()
    while True:
        with suppress(OSError):
            if condition():
                return time.monotonic() - began
        require(time.monotonic() - began < seconds, f"not after {seconds:g} s")
        time.sleep(0.5)


# -- checks: each returns what was seen, or raises FailedError or NotRunError


def mpi(site: Site, day: Day) -> str:
    if day.engine != TENSORRT_LLM:
        raise NotRunError("only TensorRT-LLM starts its ranks by MPI")
    start = try_start(os.environ)
    require(not start.problem, start.problem)
    return str(start)


def repeated(site: Site, day: Day) -> str:
    day.answers = {prompt: site.ask(prompt) for prompt in PROMPTS}
    lengths = {len(answer.tokens) for answer in day.answers.values()}
    require(lengths == {ANSWER_TOKENS}, f"answers of {lengths} tokens, not of {ANSWER_TOKENS}")
    return compared({prompt: site.ask(prompt) for prompt in PROMPTS}, day)


def conversation(site: Site, day: Day) -> str:
    prompt = fresh(300)
    for question in ("And then?", "Why so?", ""):
        day.turns.append(prompt)
        day.answers[prompt] = answer = site.ask(prompt, max_tokens=60)
        prompt += f"{answer.text}\n{question} "
    return f"{len(day.turns)} turns"


def speed(site: Site, day: Day) -> str:
    prompts, began = [fresh(400) for _ in range(32)], time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: site.ask(prompt, max_tokens=64), prompts))
    ttft = statistics.median(answer.ttft for answer in answers)
    rate = sum(len(answer.tokens) for answer in answers) / (time.monotonic() - began)
    day.speeds[site.order] = ttft, rate
    seen = f"TTFT {ttft * 1000:.0f} ms, {rate:.0f} tokens/s"
    if site.order == UPSTREAM or UPSTREAM not in day.speeds:
        return seen
    of_ttft, of_rate = ttft / day.speeds[UPSTREAM][0], rate / day.speeds[UPSTREAM][1]
    seen += f"; {of_ttft:.2f} and {of_rate:.2f} of {UPSTREAM}'s"
    require(site.order != AGG or (of_rate >= LEAST_SPEED and of_ttft <= MAX_TTFT), seen)
    return seen


def takes(order: str) -> Run:
    def check(site: Site, day: Day) -> str:
        if site.order != order:
            site.command("switch", "--to", order)
            site.order = order
            return "switched"
        return "started so"

    return check


def tokens(site: Site, day: Day) -> str:
    answers = {prompt: site.ask(prompt) for prompt in PROMPTS}
    for answer in answers.values():
        trace = answer.engine_data.get("disagg") or {}
        is_right = trace.get("strategy") == site.order and not trace.get("fallbacks")
        require(is_right, f"served as {trace}, not as {site.order}")
    return compared(answers, day)


def is_city(text: str) -> bool:
    with suppress(ValueError, AttributeError):
        return bool(json.loads(text).keys() == {"city", "people"})
    return False


def guided(site: Site, day: Day) -> str:
    day.require_model()
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    text = (
        site.chat("Name a city and its number of people, as JSON.", response_format=schema)["content"] or ""
    )
    require(is_city(text), f"no JSON of the schema: {text[:100]!r}")
    return str(text[:60])


def tools(site: Site, day: Day) -> str:
    day.require_model()
    function = {"name": "store", "description": "Stores a city", "parameters": SCHEMA}
    choice = {"type": "function", "function": {"name": "store"}}
    message = site.chat(
        "Store a city.", tools=[{"type": "function", "function": function}], tool_choice=choice
    )
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    require(arguments and is_city(arguments[0]), f"no call of the tool: {str(message)[:100]}")
    return str(arguments[0][:60])


def prompt_logprobs(site: Site, day: Day) -> str:
    """Asks twice; the second time, the prompt is cached."""
    day.require_model()
    prompt = fresh(200)
    first, second = (
        [
            next(iter(entry.values()))["logprob"]
            for entry in site.ask(prompt, max_tokens=2, prompt_logprobs=1).engine_data.get("prompt_logprobs")
            or ()
            if entry
        ]
        for _ in range(2)
    )
    require(first, "no entries")
    require(len(first) == len(second), f"{len(first)} entries, the second time {len(second)}")
    apart = max(abs(a - b) for a, b in zip(first, second, strict=True))
    require(apart < 0.5, f"entries of the second time are {apart:.2f} away")
    return f"{len(first)} entries, twice within {apart:.3f}"


def leaving(site: Site, day: Day) -> str:
    """Clients that leave during a prefill with prompt_logprobs must not disturb others."""
    with ThreadPoolExecutor(16) as pool:
        asked = at_once(pool, site)
        for number in range(1, 13):
            pool.submit(site.leave, fresh(400), 0.01 * number, prompt_logprobs=1)
    return compared(results(asked), day)


def choices(site: Site, day: Day) -> str:
    try:
        reply = site.post("/v1/completions", prompt=PROMPTS[0], n=2, temperature=1.0, max_tokens=20)
    except RefusedError as error:
        require(error.status == 400, str(error))
        raise NotRunError(f"refused: {error}") from error
    require(len(reply["choices"]) == 2, f"{len(reply['choices'])} choices")
    return "2 choices"


def cancel(site: Site, day: Day) -> str:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: site.ask(fresh(), leave_after=2, max_tokens=1000), range(8)))
    took = until(lambda: not any(site.gauge(each, *IN_FLIGHT) for each in site.workers()), SECONDS)
    return f"no request and no block is left after {took:.0f} s; {tokens(site, day)}"


def next_turn(site: Site, day: Day) -> str:
    require(day.turns, "agg has had no conversation")
    answers = {prompt: site.ask(prompt, max_tokens=60) for prompt in day.turns}
    cached = [answer.cached for answer in answers.values()]
    require(any(cached[1:]) or day.engine == RECORDING, f"no token of an earlier turn was cached: {cached}")
    return f"{compared(answers, day)}; cached tokens {cached}"


def kill(role: str) -> Run:
    """Other workers continue the answers. Without another first stage, answers are cut but never wrong."""

    def check(site: Site, day: Day) -> str:
        begun, workers = threading.Semaphore(0), site.workers()
        victims = site.workers(role)
        require(victims, f"no {role} worker is ready")
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            asked = at_once(pool, site, on_first=begun.release)
            has_begun = all(begun.acquire(timeout=SECONDS) for _ in PROMPTS)
            os.kill(victims[0].pid, signal.SIGKILL)
        require(has_begun, "no answer has begun")
        took = until(lambda: _are_back(site, workers, victims[0]), day.load_seconds)
        answers, may_be_cut = results(asked), site.order == f"{role}_first" and len(victims) == 1
        cut = [prompt for prompt, answer in answers.items() if not answer.has_end and may_be_cut]
        for prompt in cut:
            had = answers.pop(prompt).tokens
            require(
                had == day.answers[prompt].tokens[: len(had)], f"a wrong token in an answer of {len(had)}"
            )
        seen = compared(answers, day) + (f", {len(cut)} cut with the only first stage" if cut else "")
        return f"{seen}; {len(workers)} workers again after {took:.0f} s, {tokens(site, day)}"

    return check


def _are_back(site: Site, before: Sequence[ProcessRecord], victim: ProcessRecord) -> bool:
    now = site.workers()
    with suppress(FailedError):  # the frontend has not found them yet
        is_same = len(now) == len(before) and victim.pid not in [each.pid for each in now]
        return is_same and site.ask(PROMPTS[0], max_tokens=2).has_end
    return False


def flip(site: Site, day: Day) -> str:
    """A worker that returns to its role reports statistics and cache events as before."""
    decode = site.workers("decode")
    if len(decode) < 2:
        raise NotRunError("needs --decode-workers 2, and GPUs for them")
    before = _hits_and_load(site, decode[-1])
    for role in ("prefill", "decode"):
        site.command("flip", "--force", "--timeout", "300", "--instance", decode[-1].name, "--to", role)
    after = _hits_and_load(site, decode[-1])
    seen = f"hits {before[0]} before and {after[0]} after, most blocks {before[1]:g} and {after[1]:g}"
    require(after[0] >= before[0] - 1 and (after[1] > 0) == (before[1] > 0), seen)
    equal = tokens(site, day)
    if day.engine == RECORDING:
        raise NotRunError(f"this engine has no cache and no load to tell; {equal}")
    require(before[0], f"{seen}: no prompt hits the cache")
    return f"{seen}; {equal}"


def _hits_and_load(site: Site, worker: ProcessRecord) -> tuple[int, float]:
    """Of twelve prompts asked twice: the number cached the second time, and the worker's max blocks meanwhile."""
    prompts, peak, answers = [fresh(200) for _ in range(12)], 0.0, list[Answer]()
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(site.ask, prompt, max_tokens=30) for prompt in prompts]
            while not all(answer.done() for answer in asked):
                peak = max(peak, site.gauge(worker, "trtllm_disagg_kv_blocks_used"))
                time.sleep(0.05)
            answers = [answer.result() for answer in asked]
        time.sleep(1.0)  # the router hears of the blocks
    return sum(answer.cached > 0 for answer in answers), peak


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    #: The deployment that it needs; neighbours share one.
    where: str
    run: Run


IN_EACH_ORDER: tuple[tuple[str, Run], ...] = (
    ("tokens as agg's", tokens),
    ("JSON of a schema", guided),
    ("a forced tool", tools),
    ("prompt_logprobs, twice", prompt_logprobs),
    ("clients leave beside others", leaving),
    ("n: 2", choices),
    ("cancel", cancel),
    ("the next turn", next_turn),
    ("speed", speed),
    ("flip there and back", flip),
    ("kill -9 of decode", kill("decode")),
    ("kill -9 of prefill", kill("prefill")),
)
CHECKS = (
    Check("MPI starts a rank", MACHINE, mpi),
    Check(f"{UPSTREAM}: speed", UPSTREAM, speed),
    Check("agg: the same answer twice", AGG, repeated),
    Check("agg: a conversation", AGG, conversation),
    Check("agg: speed", AGG, speed),
    *(
        Check(f"{order}: {name}", PAIR, run)
        for order in ORDERS
        for name, run in (("the order", takes(order)), *IN_EACH_ORDER)
    ),
    Check("router: tokens as agg's", ROUTER, tokens),
    Check("router: JSON of a schema", ROUTER, guided),
    Check("router: speed", ROUTER, speed),
)


@dataclass(frozen=True, slots=True)
class Row:
    verdict: str
    name: str
    seen: str

    def __str__(self) -> str:
        return f"{self.verdict:8}{self.name:45}{' '.join(self.seen.split())}"


def tried(check: Check, site: Site, day: Day) -> Row:
    try:
        return Row(PASS, check.name, check.run(site, day))
    except NotRunError as error:
        return Row(NOT_RUN, check.name, str(error))
    except FailedError as error:
        return Row(FAIL, check.name, str(error))
    except Exception as error:  # a connection that broke, an answer of another shape: the next check goes on
        return Row(FAIL, check.name, f"{type(error).__name__}: {error}")


def rows(
    day: Day, start: Callable[[str], AbstractContextManager[Site]], checks: Sequence[Check] = CHECKS
) -> Iterator[Row]:
    """If a deployment fails to start, that is a FAIL, and its checks are NOT RUN."""
    for where, of_one in groupby(checks, key=lambda check: check.where):
        waiting = list(of_one)
        try:
            with start(where) as site:
                while waiting:
                    yield tried(waiting.pop(0), site, day)
        except NotRunError as error:
            yield from (Row(NOT_RUN, check.name, str(error)) for check in waiting)
        except FailedError as error:
            yield Row(FAIL, f"{where}: starts and stops", str(error))
            yield from (Row(NOT_RUN, check.name, f"no {where}") for check in waiting)


def parser_for(description: str, out: str) -> argparse.ArgumentParser:
    """`out`: the file to paste."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default=TENSORRT_LLM)
    parser.add_argument("--engine-configs", type=Path, help="with agg.yaml, prefill.yaml and decode.yaml")
    parser.add_argument("--gpus", help="of each deployment's workers; deployments run one after the other")
    parser.add_argument("--decode-workers", default=1, type=int, help="2: flips are tried")
    parser.add_argument("--worker-args", default="", help="more arguments for every worker")
    parser.add_argument("--load-seconds", default=1800.0, type=float, help="for one start of a deployment")
    parser.add_argument("--only", default="", metavar="WORD", help="checks with it in their line, and agg's")
    parser.add_argument("--out", default=Path(out), type=Path)
    return parser


def report(options: argparse.Namespace, all_checks: Sequence[Check]) -> int:
    """Runs the checks, prints and writes a line for each, and returns the exit status."""
    day, began, seen = Day(options.engine, options.load_seconds), time.monotonic(), list[Row]()
    checks = [check for check in all_checks if options.only in check.name or check.where == AGG]
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as scratch:
        for row in rows(day, lambda where: serving(where, options, Path(scratch)), checks):
            print(f"[{time.monotonic() - began:5.0f} s] {row}", flush=True)
            seen.append(row)
    counts = ", ".join(
        f"{sum(row.verdict == verdict for row in seen)} {verdict}" for verdict in (PASS, FAIL, NOT_RUN)
    )
    head = f"{counts}, after {(time.monotonic() - began) / 60:.0f} minutes: {shlex.join(sys.argv)}"
    configs = options.engine_configs
    files = [str(configs / f"{role}.yaml") for role in ("prefill", "decode")] if configs else []
    report = subprocess.run([*CLI, "doctor", *files, "--report"], capture_output=True, text=True).stdout
    options.out.write_text("\n".join([head, *map(str, seen), "", report]))
    print(f"{counts}; to paste: {options.out}")
    return int(any(row.verdict == FAIL for row in seen))


if __name__ == "__main__":
    sys.exit(report(parser_for(__doc__, "gpu-day.txt").parse_args(), CHECKS))
