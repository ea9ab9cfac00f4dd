"""Checks a running deployment by its processes, as `top` reads them, and by answers to requests.

Each function in `FINDINGS` checks one thing, and says "not known" when it has seen too little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trtllm_disagg.config.worker_config import Role
from trtllm_disagg.errors import ConfigError
from trtllm_disagg.strategies import STRATEGIES, orders
from trtllm_disagg.tools.doctor.rules import Finding, Row
from trtllm_disagg.tools.top.frontend import Answer, FrontendClient, ProbeFailedError, fresh_prompt
from trtllm_disagg.tools.top.observers import Observer
from trtllm_disagg.tools.top.snapshot import DEAD, SILENT, Snapshot
from trtllm_disagg.tools.up.plan import NO_WORKERS

#: An idle worker publishes KV events within 0.1 s.
_EVENT_SECONDS, _POLL_SECONDS = 10.0, 0.2
_LOCAL = "local"
_SERVING = ("ready", "listed")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Observed:
    url: str
    model: str
    snapshot: Snapshot
    #: Answer to a plain request.
    plain: Answer | ProbeFailedError
    #: Answer to a request that names an order, sent if `plain` stayed on one worker.
    ordered: Answer | ProbeFailedError | None = None
    #: Last answer to the repeated prompt, and the seconds until the router had its blocks.
    repeated: Answer | None = None
    seconds: float = 0.0

    @property
    def crossing(self) -> Answer | ProbeFailedError:
        """Answer to the request that should use both stages."""
        return self.plain if self.ordered is None else self.ordered


def look(
    frontend: FrontendClient, observer: Observer, model: str | None, say: Say, seconds: float = _EVENT_SECONDS
) -> Observed:
    """Raises ConfigError without a frontend, or if it does not serve `model`."""
    name = _chosen(frontend.models(), model, frontend.url)
    sizes = frontend.sizes(name)
    prompt = fresh_prompt(sizes)
    snapshot = asyncio.run(observer.look())
    say("sending a prompt")
    plain = _ask(frontend, name, prompt)
    ordered, repeated, waited = None, None, 0.0
    if isinstance(plain, Answer):
        if plain.trace is not None and plain.trace.strategy == _LOCAL:
            names = [each.name for each in orders()]
            order = snapshot.strategy if snapshot.strategy in names else "decode_first"
            say(f"it stayed on one worker; asking for {order}")
            ordered = _ask(frontend, name, fresh_prompt(sizes), (f"disagg:{order}",))
        say("repeating it until the router has its blocks")
        repeated, waited = _repeat(frontend, name, prompt, seconds)
    return Observed(frontend.url, name, snapshot, plain, ordered, repeated, waited)


def _chosen(models: list[str], wanted: str | None, url: str) -> str:
    if wanted is None and len(models) == 1:
        return models[0]
    if not models:
        raise ConfigError.bad_value("--url", url, "a frontend that serves a model; no worker is registered")
    if wanted in models:
        return wanted
    if wanted is None:
        raise ConfigError(f"--model is missing: {url} serves {', '.join(models)}")
    raise ConfigError.bad_value("--model", wanted, f"one of {', '.join(models)}")


def _ask(
    frontend: FrontendClient, model: str, prompt: str, annotations: tuple[str, ...] = ()
) -> Answer | ProbeFailedError:
    try:
        return frontend.ask(model, prompt, annotations)
    except ProbeFailedError as error:
        return error


def _repeat(frontend: FrontendClient, model: str, prompt: str, seconds: float) -> tuple[Answer | None, float]:
    """Returns no answer when a request fails."""
    began = time.monotonic()
    while True:
        answer = _ask(frontend, model, prompt)
        waited = time.monotonic() - began
        if isinstance(answer, ProbeFailedError):
            return None, waited
        if answer.hit_rate is None or answer.hit_rate > 0 or waited > seconds:
            return answer, waited
        time.sleep(_POLL_SECONDS)


def findings(seen: Observed) -> list[Finding]:
    return [finding for find in FINDINGS for finding in find(seen)]


def _answers(seen: Observed) -> Iterator[Finding]:
    rule = Row("answers", "the other checks need an answer")
    if isinstance(seen.plain, ProbeFailedError):
        yield rule.error("no", f"{seen.plain}; see the logs of the frontend and the workers")
    else:
        yield rule.fine(f"{seen.model}, a prompt of {seen.plain.prompt_tokens} tokens")


def _workers(seen: Observed) -> Iterator[Finding]:
    rule = Row("workers", "a request needs a worker of each role to use both stages")
    workers = [each for each in seen.snapshot.processes if each.role not in NO_WORKERS]
    value = ", ".join(each.name for each in workers)
    roles = {each.role for each in workers if each.state in _SERVING}
    missing = {Role.PREFILL.value, Role.DECODE.value} - roles
    gone = [each for each in workers if each.state in (DEAD, SILENT)]
    if not workers:
        yield rule.unknown("the frontend lists no worker; run doctor on its machine, as its user")
    elif gone:
        yield rule.error(value, "; ".join(f"{each.name}: {each.state}; see its log" for each in gone))
    elif len(missing) == 1 and not roles - {Role.PREFILL.value, Role.DECODE.value}:
        yield rule.error(value, f"start a {' and '.join(sorted(missing))} worker, or see its log")
    elif skipped := [each.name for each in workers if each.load.breakers_open]:
        yield rule.note(value, f"the circuit breaker of {', '.join(skipped)} skips a worker; see its log")
    else:
        yield rule.fine(value)


def _order(seen: Observed) -> Iterator[Finding]:
    rule = Row("order", "a fallback can serve a request in another order than configured")
    if isinstance(seen.plain, ProbeFailedError):
        return
    trace = seen.plain.trace
    if trace is None or not trace.strategy:
        yield rule.unknown("the answer has no engine_data.disagg: another project's workers")
        return
    value, deployed = f"{trace.strategy} ({trace.reason})", seen.snapshot.strategy
    if trace.fallbacks:
        yield rule.error(value, "a fallback served the request: " + "; ".join(trace.fallbacks))
    elif trace.strategy == _LOCAL:
        stays = f"a prompt of {seen.plain.prompt_tokens} tokens stays on the first worker"
        yield rule.note(value, f"{stays} (docs/reference/deciders.md)")
    elif deployed not in ("", "auto", trace.strategy):
        yield rule.note(value, f"the deployment's order is {deployed}")
    else:
        yield rule.fine(value)


def _stages(seen: Observed) -> Iterator[Finding]:
    rule = Row("both stages", "a first stage that answers alone looks healthy but has twice the planned load")
    kv = Row("KV moved", "without the KV, a decode worker computes the prompt again")
    answer = seen.crossing
    if isinstance(seen.plain, ProbeFailedError) or _is_one_stage(seen.plain):
        return
    if isinstance(answer, ProbeFailedError):
        yield rule.error("no answer", str(answer))
        return
    moved = answer.trace.kv_transfer_bytes if answer.trace else None
    others = _other_stage(answer)
    if others or moved:
        yield rule.fine(others or "yes, through the prefill queue")
    elif answer.trace is None:
        yield rule.unknown("the answer does not name its workers")
        return
    else:
        because = "; ".join(answer.trace.fallbacks) or f"reason: {answer.trace.reason}"
        yield rule.error("one worker did both", f"find out why it did not call the other stage; {because}")
        return
    if moved:
        yield kv.fine(f"{moved:,} bytes")
    elif moved == 0:
        yield kv.error("0 bytes", "see the transfer in the decode worker's log")
    else:
        yield kv.unknown(
            "the engine has not measured the transfer; give the workers --publish-metrics (some of TensorRT-LLM's "
            "transceivers never measure it)"
        )


def _is_one_stage(answer: Answer) -> bool:
    spec = STRATEGIES.get(answer.trace.strategy) if answer.trace is not None else None
    return spec is not None and not spec.is_disaggregated


def _other_stage(answer: Answer) -> str:
    """Names the worker of the second stage, if the answer does."""
    trace = answer.trace
    if trace is not None and not trace.fallbacks:
        for role, named in ((Role.PREFILL, trace.prefill_instance), (Role.DECODE, trace.decode_instance)):
            if named:
                return f"yes, {role.value} {named}"
    chosen = answer.prefill_worker, answer.decode_worker
    if None not in chosen and chosen[0] != chosen[1]:
        return f"yes, prefill {chosen[0]:x} and decode {chosen[1]:x}"
    return ""


def _events(seen: Observed) -> Iterator[Finding]:
    rule = Row("KV events", "KV events tell the router which worker has cached the prompt's start")
    last, waited = seen.repeated, f"{seen.seconds:.1f} s"
    if last is None:
        return
    if last.hit_rate is None:
        yield rule.note("not used", "the frontend does not route by KV cache; give it --router-mode kv")
    elif last.hit_rate > 0:
        yield rule.fine(f"the router found {last.hit_rate:.0%} of the blocks after {waited}")
    elif last.cached_tokens:
        yield rule.error(
            f"none after {waited}; the worker reused {last.cached_tokens} tokens",
            "--publish-kv-events on the workers of the first stage; its port open to the frontend (DYN_EVENT_PLANE)",
        )
    else:
        yield rule.error(
            f"none after {waited}, and no block was reused",
            "kv_cache_config.enable_block_reuse: true, and --publish-kv-events on the workers of the first stage",
        )


FINDINGS: tuple[Callable[[Observed], Iterable[Finding]], ...] = (_answers, _workers, _order, _stages, _events)
