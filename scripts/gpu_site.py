"""The deployments of `gpu_day`, and answers of their frontends as clients get them."""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.upstream_worker import UPSTREAM_COMMAND
from trtllm_disagg.tools.up import up_command
from trtllm_disagg.tools.up.lifecycle import deployment_in_background
from trtllm_disagg.tools.up.plan import NO_WORKERS, DeploymentFailedError
from trtllm_disagg.tools.up.run_dir import ProcessRecord, read_processes
from trtllm_disagg.tools.up.status import Status

CLI = (sys.executable, "-m", "trtllm_disagg")
MACHINE, AGG, UPSTREAM, PAIR, ROUTER = "machine", "agg", "dynamo.trtllm", "pair", "router"
ORDERS = ("prefill_first", "decode_first")
TENSORRT_LLM, RECORDING = "tensorrt_llm", "recording"
ANSWER_TOKENS = 200
#: If log probabilities of two tokens are this close, another batch or kernel may swap the tokens.
TIE = 0.1
SECONDS = 60.0
STOP_SECONDS = 300.0


class FailedError(Exception):
    """A check saw something wrong."""


class NotRunError(Exception):
    """A check cannot run here."""


class RefusedError(FailedError):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:200]}")
        self.status = status


def require(is_right: object, seen: str) -> None:
    if not is_right:
        raise FailedError(seen)


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds after the question. `gaps`: between log probabilities of the two likeliest tokens."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    gaps: tuple[float, ...] = ()
    cached: int = 0
    ttft: float = math.inf
    has_end: bool = False
    engine_data: Mapping[str, Any] = field(default_factory=dict)

    def after(self, event: Mapping[str, Any], seconds: float) -> Answer:
        """The answer with one more event of its stream."""
        extra, usage = event.get("nvext") or {}, event.get("usage") or {}
        choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
        likeliest = (choice.get("logprobs") or {}).get("top_logprobs") or ()
        more = tuple(extra.get("completion_token_ids") or ())
        return Answer(
            tokens=self.tokens + more,
            text=self.text + (choice.get("text") or ""),
            gaps=self.gaps + tuple(_gap(each.values()) for each in likeliest),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self.cached,
            ttft=min(self.ttft, seconds) if more else self.ttft,
            has_end=self.has_end or bool(choice.get("finish_reason")),
            engine_data=extra.get("engine_data") or self.engine_data,
        )


def _gap(logprobs: Iterator[float]) -> float:
    first, second, *_ = [*sorted(logprobs, reverse=True), -math.inf, -math.inf]
    return first - second


def difference(answer: Answer, right: Answer) -> str:
    """Empty for equal tokens; a sentence if they differ from a tie on. Otherwise raises FailedError."""
    if answer.tokens == right.tokens:
        return ""
    pairs = zip(answer.tokens, right.tokens, strict=False)
    at = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), len(answer.tokens))
    gap = right.gaps[at] if at < min(len(right.gaps), len(answer.tokens)) else math.inf
    require(
        gap < TIE, f"token {at} of {len(right.tokens)} differs, where the next likely one is {gap:.2f} away"
    )
    return f"; apart from token {at} on, at a tie ({gap:.3f})"


@dataclass
class Site:
    """A frontend, and the run directory of its `up` (None: Dynamo's own worker)."""

    url: str
    model: str
    order: str = ""
    run_dir: Path | None = None

    def post(self, path: str, **body: Any) -> Any:
        """Raises RefusedError unless the status is 200."""
        with self._open(path, body) as response:
            return json.load(response)

    def chat(self, content: str, **more: Any) -> Any:
        """Message of a greedy answer."""
        messages = [{"role": "user", "content": content}]
        reply = self.post("/v1/chat/completions", messages=messages, max_tokens=300, temperature=0, **more)
        return reply["choices"][0]["message"]

    def ask(
        self, prompt: str, on_first: Callable[[], object] = int, leave_after: int = 0, **more: Any
    ) -> Answer:
        """A greedy completion. The client disconnects after `leave_after` tokens."""
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"nvext": {"extra_fields": ["completion_token_ids", "engine_data"]}}
        answer, asked = Answer(), time.perf_counter()
        with self._open("/v1/completions", body | more) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                is_first = not answer.tokens
                answer = answer.after(json.loads(line[6:]), time.perf_counter() - asked)
                if is_first and answer.tokens:
                    on_first()
                if leave_after and len(answer.tokens) >= leave_after:
                    break
        return answer

    def leave(self, prompt: str, seconds: float, **more: Any) -> None:
        """Sends a request, and disconnects after `seconds`."""
        with suppress(OSError, FailedError):
            body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True} | more
            self._open("/v1/completions", body, seconds).close()

    def _open(self, path: str, body: Mapping[str, Any], seconds: float = SECONDS) -> Any:
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code, error.read().decode(errors="replace")) from error

    def workers(self, role: str = "") -> list[ProcessRecord]:
        """Ready workers, of one role or all."""
        every = read_processes(self.run_dir) if self.run_dir is not None else []
        workers = [each for each in every if each.state == "ready" and each.role not in NO_WORKERS]
        return [each for each in workers if role in ("", each.role)]

    def gauge(self, worker: ProcessRecord, *names: str) -> float:
        """Sum of the worker's metrics with these names."""
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.ports['system']}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        wanted = tuple(f"{name}{{" for name in names)
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(wanted))

    def command(self, *words: str) -> None:
        """Runs a `trtllm-disagg` command on this deployment."""
        argv = [*CLI, words[0], "--run-dir", str(self.run_dir), *words[1:]]
        done = subprocess.run(argv, capture_output=True, text=True)
        require(
            done.returncode == 0, f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr[-300:]}"
        )


@contextmanager
def serving(where: str, options: argparse.Namespace, scratch: Path) -> Iterator[Site]:
    """Raises FailedError if it does not start or stop properly, NotRunError if it cannot run here."""
    if where == MACHINE:
        yield Site("", "")
        return
    order, run_dir = {PAIR: ORDERS[0], UPSTREAM: AGG}.get(where, where), scratch / where
    names = ("model", "engine", "engine_configs", "gpus", "worker_args")
    flags = {name: getattr(options, name) for name in names}
    flags |= {"strategy": order, "http_port": 0, "run_dir": run_dir}
    flags |= {"decode_workers": options.decode_workers} if where == PAIR else {}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value not in (None, "")]
    if where == UPSTREAM:
        with _upstream(argv, options) as ready:
            yield _site(ready, UPSTREAM)
    else:
        with _up(argv, scratch / f"{where}.log", options.load_seconds) as ready:
            yield replace(_site(ready, order), run_dir=run_dir)


def _site(ready: str, order: str) -> Site:
    _, url, model, *_ = ready.split()
    return Site(url, model.removeprefix("model="), order)


@contextmanager
def _up(argv: Sequence[str], log: Path, load_seconds: float) -> Iterator[str]:
    """Runs `trtllm-disagg up`, yields its ready line, and stops it as Ctrl-C does."""
    with (
        log.open("w") as errors,
        subprocess.Popen([*CLI, "up", *argv], stdout=subprocess.PIPE, stderr=errors, text=True) as up,
    ):
        slow = threading.Timer(load_seconds, up.terminate)
        slow.start()
        try:
            ready = next((line for line in up.stdout or () if line.startswith("ready ")), "")
            require(ready, f"`up` ended: {' / '.join(log.read_text().splitlines()[-5:])}")
            slow.cancel()
            yield ready
        finally:
            slow.cancel()
            up.send_signal(signal.SIGINT)
            code = up.wait(STOP_SECONDS)
    require(code == 0, f"`up` ended with {code}: {' / '.join(log.read_text().splitlines()[-3:])}")


@contextmanager
def _upstream(argv: Sequence[str], options: argparse.Namespace) -> Iterator[str]:
    """Dynamo's own worker and frontend, with the engine file of agg."""
    if options.engine != RECORDING and not (options.engine == TENSORRT_LLM and options.engine_configs):
        raise NotRunError("needs TensorRT-LLM and --engine-configs, or the recording engine")
    parser = argparse.ArgumentParser()
    up_command.add_arguments(parser)
    args = parser.parse_args(argv)
    config = up_command.config_from(args, args.run_dir)
    try:
        with deployment_in_background(replace(config, worker_command=UPSTREAM_COMMAND), Status()) as deployed:
            yield deployed.config.ready_line
    except DeploymentFailedError as error:
        raise FailedError(str(error)) from error
